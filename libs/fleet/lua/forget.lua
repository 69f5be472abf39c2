-- silent: {worker, time of its last heartbeat} * n. Removes those without a heartbeat since. Returns
-- the version of the last removal, 0 without one.
local version = 0
for at = silent, #ARGV, 2 do
  if call('ZSCORE', heard, ARGV[at]) == ARGV[at + 1] then version = math.max(version, remove(ARGV[at])) end
end
return version
