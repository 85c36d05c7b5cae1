"""Three tasks a business would run, each with a generator and an exact scorer.

Put the ``examples`` folder on ``sys.path``, then:

    from tasks import HELD_OUT_SEED, TASKS

    task = TASKS["triage"]                 # or "products", "sql"; the module tasks.triage itself
    examples = task.generate(100, HELD_OUT_SEED, heldout=True)
    for example in examples:
        body = {
            "model": "triage",
            "messages": task.messages(example.user),   # [system, user]
            "max_tokens": task.MAX_TOKENS,
            "temperature": 0,
        }
        ...
        right = task.score(reply_text, example.answer)

Every task module has

    NAME        the task's name, which is also its adapter folder's
    SYSTEM      the system prompt, the same in every request of the task (a shared prefix)
    MAX_TOKENS  enough for every right answer and its end-of-turn token
    messages(user) -> [{"role": "system", ...}, {"role": "user", ...}]
    generate(n, seed, *, heldout=False) -> list[Example]
    score(text, answer) -> bool

``generate`` returns n distinct examples and depends on nothing but its arguments. The training
and held-out sides of a task never share an example: they draw names and numbers from disjoint
sets, and combinations of wordings from disjoint sets too. Only the standard library is needed.
"""

from . import products, sql, triage
from .base import HELD_OUT_SEED, Example, Task

TASKS: dict[str, Task] = {task.NAME: task for task in (triage, products, sql)}

__all__ = ["HELD_OUT_SEED", "TASKS", "Example", "Task"]
