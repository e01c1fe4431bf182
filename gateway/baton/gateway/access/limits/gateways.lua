-- Renews this gateway's lease. Returns the number of gateways with a valid lease.
local time = redis.call('TIME')
local now_ms = tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
local lease_ms = tonumber(ARGV[2])
redis.call('ZADD', KEYS[1], now_ms, ARGV[1])
redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', now_ms - lease_ms)
redis.call('PEXPIRE', KEYS[1], 2 * lease_ms)
return redis.call('ZCARD', KEYS[1])
