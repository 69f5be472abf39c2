local function next_version(count)     -- reserves as many versions and returns the first
  -- They rise within a generation. Another one begins when another server takes over, or the data
  -- was lost: writes that readers have seen may be missing.
  local time = call('TIME')
  local microseconds = time[1] * 1000000 + time[2]
  local server = string.match(call('INFO', 'server'), 'run_id:(%w+)') or ''
  local history = string.match(call('INFO', 'replication'), 'master_replid:(%w+)') or ''
  local held = call('GET', generation)
  if not held or string.match(held, '^%w*') ~= server .. history then
    call('SET', generation, string.format('%s %.0f', server .. history, microseconds))
  end
  local first = math.max((tonumber(call('GET', counter)) or 0) + 1, microseconds)
  call('SET', counter, string.format('%.0f', first + count - 1))
  return first
end

local function expire()                -- workers a day after the last heartbeat, cards after a week
  -- Versions of cards are read by the generation and counter, so these last as long.
  for _, key in ipairs({workers, changes, gone, heard, usage, lists, tags}) do call('PEXPIRE', key, DAY) end
  for _, key in ipairs({generation, counter, cards, card_changes}) do call('PEXPIRE', key, 7 * DAY) end
end

local function remove(worker)          -- returns the version, 0 if it is unknown; readers see it for a minute
  if call('ZREM', changes, worker) == 0 then return 0 end
  local version = next_version(1)
  call('ZREMRANGEBYSCORE', gone, '-inf', version - 60 * 1000000)
  call('ZADD', gone, string.format('%.0f', version), worker)
  call('ZREM', heard, worker)
  for _, key in ipairs({workers, usage, lists, tags}) do call('HDEL', key, worker) end
  return version
end
