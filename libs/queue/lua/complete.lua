-- results: {id, result} * n. Returns {accepted, position of an accepted result that router_id owns,
-- ...}, from 0.
local all, ids, places, answer, finished, answers = {}, {}, {}, { 0 }, {}, {}
for at = results, #ARGV, 2 do all[#all + 1] = ARGV[at] end
for place, is in ipairs(was_given(all, worker_id, batch_id)) do
  if is then ids[#ids + 1], places[#places + 1], finished[all[place]] = all[place], place, true end
end
for position, router in ipairs(finish(ids)) do
  local place = places[position]
  if router then answer[1] = answer[1] + 1 end
  if router == router_id then
    answer[#answer + 1] = place - 1
  elseif router then
    collect(answers, router, ids[position], ARGV[results + 2 * place - 1])
  end
end
push(answers)
count('done', answer[1])
if not release then return answer end
local jobs, back = unlease(batch_id, #ids == 0 and worker_id or nil) or {}, false
for i = 2, #jobs, 2 do
  local id = parse(jobs[i])
  if not finished[id] and holds(jobs[i], id) then
    requeue(jobs[i], jobs[i + 1])
    call('HDEL', holders, id)
    back = true
  end
end
if back then call('PUBLISH', channel, lane) else settle() end
return answer
