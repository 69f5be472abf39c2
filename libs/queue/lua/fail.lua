-- Answers at most `limit` waiting jobs of each class with `result`. Returns {jobs answered, 1 if
-- jobs are left}.
local answered, answers = 0, {}
for _, queue in ipairs({ interactive, bulk }) do
  local heads, ids = call('ZRANGE', queue, 0, limit - 1), {}
  for position, member in ipairs(heads) do ids[position] = parse(member) end
  for position, router in ipairs(finish(ids)) do
    if router then
      answered = answered + 1
      collect(answers, router, ids[position], result)
    end
  end
  write('ZREM', queue, heads)      -- also those without a payload, if Redis lost part of its data
end
push(answers)
count('done', answered)
settle()
return { answered, call('EXISTS', interactive, bulk) > 0 and 1 or 0 }
