"""The scripts on the way of every job: in, out to a worker, and back. `Lanes` calls them and decodes what they answer.

Waiting jobs are ordered by start-time fair queueing (Goyal, Vin, Cheng, SIGCOMM 1996), for each priority by itself: a job's start
tag is the larger of the lane's virtual time and its tenant's last finish tag; its finish tag is tokens / weight after that; virtual
time is the start tag of the job last leased. Backlogged tenants thus get tokens by weight, whatever their backlog.
"""

from __future__ import annotations

from libs.queue.library import KEYS, LIBRARY
from libs.queue.scripts import Reply, Rest, script

lane_script = script(*KEYS, library=LIBRARY)


@lane_script
async def enqueue(*, lane: str, bell: str, ring: bool, router_id: str, now_ms: int, max_tokens: int, groups: Rest) -> Reply:
    """
    -- groups: {jobs, tokens of the group in later calls, {id, tenant, weight, tokens, deadline, class, payload} * jobs} * groups
    -- Answers 1 or 0 for each group: admitted or not. max_tokens < 0: no limit, for the later calls of a group.
    local state = call('HMGET', meta, 'queued', 'vi', 'vb')
    local queued, virtual = tonumber(state[1] or 0), { i = tonumber(state[2] or 0), b = tonumber(state[3] or 0) }
    local tags, members, payloads, owners, names = { i = {}, b = {} }, { i = {}, b = {} }, {}, {}, {}
    local fresh, added, added_tokens = {}, 0, 0

    local function add(at)
      local id, tenant, tokens, class = ARGV[at], ARGV[at + 1], tonumber(ARGV[at + 3]), ARGV[at + 5]
      local last = tags[class][tenant] or tonumber(call('HGET', class == 'i' and tags_i or tags_b, tenant) or 0)
      local start = math.max(virtual[class], last)
      tags[class][tenant] = start + tokens / math.max(tonumber(ARGV[at + 2]), 1e-6)
      local list, member = members[class], class .. ':' .. ARGV[at + 3] .. ':' .. ARGV[at + 4] .. ':' .. id
      list[#list + 1], list[#list + 2] = start, member
      payloads[#payloads + 1], payloads[#payloads + 2] = id, ARGV[at + 6]
      owners[#owners + 1], owners[#owners + 2] = id, router_id .. '\\0' .. member
      if class == 'i' then names[#names + 1], names[#names + 2] = id, tenant end
      fresh[id], added, added_tokens = true, added + 1, added_tokens + tokens
    end

    local function admit(first, last, later)
      local ids, new, known, seen, need = {}, {}, {}, {}, later
      for at = first, last, 7 do ids[#ids + 1] = ARGV[at] end
      local _, members = lookup(ids)
      for position, member in ipairs(members) do
        local id, at = ids[position], first + 7 * (position - 1)
        if member then
          known[#known + 1], known[#known + 2] = id, router_id .. '\\0' .. member
        elseif not fresh[id] and not seen[id] then
          new[#new + 1], seen[id], need = at, true, need + tonumber(ARGV[at + 3])
        end
      end
      -- a group that is all known came before (its client asks again), and is only told where to answer
      if #new > 0 and max_tokens >= 0 and queued + added_tokens + need > max_tokens then return 0 end
      for _, at in ipairs(new) do add(at) end
      write('HSET', owner, known)
      return 1
    end

    local admitted, at = {}, groups
    while at <= #ARGV do
      local first, later = at + 2, tonumber(ARGV[at + 1])
      at = first + 7 * ARGV[at]
      admitted[#admitted + 1] = admit(first, at - 1, later)
    end
    if added == 0 then return admitted end
    for class, list in pairs(members) do
      write('ZADD', class == 'i' and interactive or bulk, list)
      local flat = {}
      for tenant, tag in pairs(tags[class]) do
        flat[#flat + 1], flat[#flat + 2] = tenant, string.format('%.17g', tag)
      end
      write('HSET', class == 'i' and tags_i or tags_b, flat)
    end
    write('HSET', payload, payloads)
    write('HSET', owner, owners)
    write('HSET', whose, names)
    if #names > 0 then call('PEXPIRE', whose, DAY) end    -- routers of before 2026-11-22 do not remove it
    count('queued', added_tokens)
    count('enqueued', added)
    count('enqueued_tokens', added_tokens)
    call('PEXPIRE', meta, DAY)
    call('ZADD', index, clock(now_ms), lane)
    if ring then call('PUBLISH', bell, lane) end
    return admitted
    """


@lane_script
async def pull(
    *,
    lane: str,
    bell: str,
    ring: bool,
    batch_id: str,
    worker_id: str,
    now_ms: int,
    lease_ms: int,
    budget_tokens: int,
    budget_jobs: int,
    max_attempts: int,
    dead_letter_limit: int,
    dead_result: bytes,
    others_than: Rest,
) -> Reply:
    """
    -- others_than: tenants whose jobs stay; if there are any, so does bulk.
    -- Answers {1, more, tokens, id, tokens, attempts, payload, id, ...}, or {0, more, next lease expiry or -1}.
    local now = clock(now_ms)
    local answer, jobs, held, size, sum, alone = { 1, 0, 0 }, { 0 }, {}, 0, 0, false
    local rounds, suspects, expired, removed_tokens = 16, false, 0, 0
    local holder = holding(worker_id, batch_id)

    local function include(id, tokens, tries, blob)
      local at = #answer
      answer[at + 1], answer[at + 2], answer[at + 3], answer[at + 4] = id, tokens, tries, blob
    end

    local packed = call('HGET', batches, batch_id)
    if packed then                     -- the answer to this very call was lost on its way; it is asked again
      jobs = cmsgpack.unpack(packed)
      if not is_of(jobs, worker_id, batch_id) then return { 0, 0, -1 } end
      call('ZADD', leases, 'XX', now + lease_ms, batch_id)
      for i = 2, #jobs, 2 do
        local id, tokens = parse(jobs[i])
        local blob = call('HGET', payload, id)
        if blob then include(id, tokens, tonumber(call('HGET', attempts, id) or 0), blob) end
      end
      answer[2], answer[3] = call('EXISTS', interactive, bulk) > 0 and 1 or 0, jobs[1]
      return answer
    end

    local function fits(tokens, tries, room, credit)
      if credit and tokens > room then return false end
      if size == 0 then return true end        -- the first job goes however large
      return tries == 0 and sum + tokens <= budget_tokens
    end

    local function consider(member, tag, room, credit)   -- tokens leased (nil: the job must wait), tokens to remove
      local id, tokens, deadline = parse(member)
      if deadline <= now then
        if not finish({ id })[1] then return 0, tokens end
        expired = expired + 1
        return 0, 0
      end
      local tries = suspects and tonumber(call('HGET', attempts, id) or 0) or 0
      if not fits(tokens, tries, room, credit) then return nil end
      local blob = call('HGET', payload, id)
      if not blob then return 0, tokens end    -- Redis lost part of its data
      include(id, tokens, tries, blob)
      local at = 2 * size
      -- What it was given to before still counts, if that lease ran out: who was only slow may answer yet.
      local before = tries > 0 and call('HGET', holders, id) or ''
      -- From 65 bytes on Redis keeps a hash as a table: a short one it searches.
      jobs[at + 2], jobs[at + 3], held[at + 1] = member, tag, id
      held[at + 2] = string.format('%-65s', holder .. string.match(before, '^(.-) *$'))
      size, sum, alone = size + 1, sum + tokens, tries > 0
      return tokens, tokens
    end

    local function take(queue, credit)         -- leases from the head of one class; tokens leased and the last start tag
      local taken, last = 0, nil
      while rounds > 0 and size < budget_jobs and not alone do
        rounds = rounds - 1
        local heads = call('ZRANGE', queue, 0, math.min(64, budget_jobs - size) - 1, 'WITHSCORES')
        local over, stop = {}, #heads == 0
        for i = 1, #heads, 2 do
          local leased, tokens = consider(heads[i], heads[i + 1], (credit or 0) - taken, credit)
          stop = not leased
          if stop then break end
          if leased > 0 then taken, last = taken + leased, heads[i + 1] end
          if tokens > 0 then over[#over + 1], removed_tokens = heads[i], removed_tokens + tokens end
          stop = alone
          if stop then break end
        end
        write('ZREM', queue, over)
        if stop then break end
      end
      return taken, last
    end

    local function take_others()               -- of the first that wait; virtual time does not move, for others were due
      local ids, left, taken, over = {}, {}, 0, {}
      for at = others_than, #ARGV do left[ARGV[at]] = true end
      local heads = call('ZRANGE', interactive, 0, 127, 'WITHSCORES')
      for i = 1, #heads, 2 do ids[#ids + 1] = (parse(heads[i])) end
      local names = #ids > 0 and call('HMGET', whose, unpack(ids)) or {}
      for i, tenant in ipairs(names) do
        if size == budget_jobs or alone then break end
        if tenant and not left[tenant] then
          local leased, tokens = consider(heads[2 * i - 1], heads[2 * i], 0, nil)
          if not leased then break end
          taken = taken + leased
          if tokens > 0 then over[#over + 1], removed_tokens = heads[2 * i - 1], removed_tokens + tokens end
        end
      end
      write('ZREM', interactive, over)
      return taken
    end

    reap(now, max_attempts, dead_letter_limit, lane, dead_result)
    suspects = call('EXISTS', attempts) == 1
    local takes_others = others_than <= #ARGV
    local state = call('HMGET', meta, 'vi', 'vb', 'credit')
    local credit, bulk_taken, bulk_last, later_taken, later_last = tonumber(state[3] or 0), 0, nil, 0, nil
    local interactive_taken, interactive_last = 0, nil
    if takes_others then
      interactive_taken = take_others()
    else
      -- Bulk goes first with what it has saved up: a ninth of the interactive tokens leased while it waited, so a tenth of all.
      if credit > 0 and call('ZCARD', interactive) > 0 then bulk_taken, bulk_last = take(bulk, credit) end
      interactive_taken, interactive_last = take(interactive, nil)
      if call('ZCARD', interactive) == 0 then later_taken, later_last = take(bulk, nil) end
    end
    bulk_taken, bulk_last = bulk_taken + later_taken, later_last or bulk_last

    count('expired', expired)
    count('queued', -removed_tokens)
    local head = call('ZRANGE', bulk, 0, 0)[1]
    local _, head_tokens = parse(head or '')
    answer[2] = (head or call('ZCARD', interactive) > 0) and 1 or 0
    if size == 0 then
      settle()
      local expiry = call('ZRANGE', leases, 0, 0, 'WITHSCORES')[2]
      return { 0, takes_others and 0 or answer[2], expiry and tonumber(expiry) or -1 }
    end
    jobs[1], answer[3] = sum, sum
    call('ZADD', leases, now + lease_ms, batch_id)
    call('HSET', batches, batch_id, cmsgpack.pack(jobs))
    write('HSET', holders, held)
    call('PEXPIRE', holders, DAY)    -- routers of before 2026-11-22 do not remove it
    count('leased', sum)
    -- virtual time never goes back, though jobs that were queued again bring old tags
    if interactive_last and tonumber(interactive_last) > tonumber(state[1] or 0) then call('HSET', meta, 'vi', interactive_last) end
    if bulk_last and tonumber(bulk_last) > tonumber(state[2] or 0) then call('HSET', meta, 'vb', bulk_last) end
    if head then                       -- saved up to one batch, or what the next job needs
      local saved = math.max(credit - bulk_taken, 0) + interactive_taken / 9
      call('HSET', meta, 'credit', math.min(saved, math.max(budget_tokens, head_tokens)))
    elseif credit > 0 then
      call('HDEL', meta, 'credit')
    end
    if ring and answer[2] == 1 then call('PUBLISH', bell, lane) end
    return answer
    """


@lane_script
async def complete(*, lane: str, bell: str, router_id: str, worker_id: str, batch_id: str, release: bool, results: Rest) -> Reply:
    """
    -- results: {id, result} * n. Answers {accepted, position of an accepted result that router_id owns, ...}, from 0.
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
    if back then call('PUBLISH', bell, lane) else settle() end
    return answer
    """


@lane_script
async def renew(*, worker_id: str, now_ms: int, lease_ms: int, batch_ids: Rest) -> Reply:
    """
    -- Answers for each batch {1, ids of jobs that are over}, or {0} if its lease has ended or is not the worker's.
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
    """


@lane_script
async def cancel(*, bell: str, router_id: str, job_ids: Rest) -> Reply:
    """
    -- Answers how many jobs it ended, and rings for each worker that holds one of them (WorkerBell): its next heartbeat tells it.
    -- A job whose client now waits at another router is left alone.
    local ids, own, workers, cancelled = { unpack(ARGV, job_ids) }, {}, {}, 0
    for position, router in ipairs((lookup(ids))) do
      if router == router_id then own[#own + 1] = ids[position] end
    end
    if #own == 0 then return 0 end
    for _, held in ipairs(call('HMGET', holders, unpack(own))) do
      if held then workers[string.match(string.match(held, '^[^\\t]*'), '^(.-) *$')] = true end
    end
    for _, router in ipairs(finish(own)) do cancelled = cancelled + (router and 1 or 0) end
    count('cancelled', cancelled)
    settle()
    for worker in pairs(workers) do call('PUBLISH', bell, '!' .. worker) end
    return cancelled
    """
