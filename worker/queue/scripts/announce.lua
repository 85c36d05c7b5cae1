redis.call('ZADD', key('seen'), now(), ask.worker)
redis.call('HSET', key('info'), ask.worker, ARGV[2])
return 0
