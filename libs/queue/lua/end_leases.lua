-- Ends the worker's leases with the name prefix `prefix`, as if they had expired. Returns how many
-- jobs went back.
local ended = {}
for _, batch_id in ipairs(call('ZRANGE', leases, 0, -1)) do
  local packed = string.sub(batch_id, 1, #prefix) == prefix and call('HGET', batches, batch_id)
  if packed and is_of(cmsgpack.unpack(packed), worker_id, batch_id) then ended[#ended + 1] = batch_id end
end
local back = recover(ended, max_attempts, dead_letter_limit, lane, dead_result)
if back > 0 then call('PUBLISH', channel, lane) else settle() end
return back
