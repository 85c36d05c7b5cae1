"""`batten up`: one process that starts the others, restarts what dies, and leaves nothing behind.

    supervisor ──┬─ guard        kills every group once the supervisor is gone, however it went
                 ├─ redis        only when REDIS_URL is not given
                 ├─ api, collector, control
                 └─ worker-1 … worker-N

Each child leads its own session, so a Ctrl-C in the terminal reaches the supervisor alone, and a
signal to the group reaches grandchildren (Celery's pool) as well.
"""
