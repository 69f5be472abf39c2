-- Returns 1 if the lane was idle and is now removed.
if call('EXISTS', interactive, bulk, leases, payload) > 0 then return 0 end
call('DEL', owner, attempts, tags_i, tags_b, batches, holders, tenant_of, watchers, meta)
call('ZREM', index, lane)
return 1
