local call = redis.call
local DAY = 86400000

local function clock()                 -- Unix ms
  local time = call('TIME')
  return time[1] * 1000 + math.floor(time[2] / 1000)
end
