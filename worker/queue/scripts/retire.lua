redis.call('ZREM', key('seen'), ask.worker)
redis.call('HDEL', key('info'), ask.worker)
return 0
