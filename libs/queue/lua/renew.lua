-- Returns for each batch {1, ids of jobs that are over}, or {0} if its lease has ended or is
-- another worker's.
local answer, expiry = {}, clock(now_ms) + lease_ms
for at = batch_ids, #ARGV do
  local packed = call('ZSCORE', leases, ARGV[at]) and call('HGET', batches, ARGV[at])
  local jobs, gone = packed and cmsgpack.unpack(packed), {}
  if jobs and is_of(jobs, worker_id, ARGV[at]) then
    call('ZADD', leases, 'XX', expiry, ARGV[at])
    for i = 2, #jobs, 2 do
      local id = parse(jobs[i])
      if not holds(jobs[i], id) then gone[#gone + 1] = id end
    end
    answer[#answer + 1] = { 1, gone }
  else
    answer[#answer + 1] = { 0 }
  end
end
return answer
