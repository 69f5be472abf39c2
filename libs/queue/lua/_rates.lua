local call = redis.call

local function clock(given)            -- Unix seconds, by Redis' own clock unless a test gives one
  if given >= 0 then return given end
  local time = call('TIME')
  return time[1] + time[2] / 1000000
end

local function until_passes(paid, now, cost, rate, burst)   -- seconds, and when the debt would be paid with this one
  if rate <= 0 then return 0, paid end
  local paid_then = math.max(paid, now) + cost / rate
  return paid_then - now - math.max(burst, cost / rate), paid_then
end
