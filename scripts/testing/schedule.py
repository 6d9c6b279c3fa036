"""The tasks that may begin now. A function of what is known, without processes and clocks.

- A task begins when everything that it needs has succeeded. What needs something that failed never begins.
- A place has room for so many tasks at once; tasks of one group never run at the same time.
- The longest begins first, so that what is left at the end is short.
- What runs alone waits until everything else has ended, and nothing begins beside it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence

from testing.tasks import Task


def next_tasks(
    tasks: Sequence[Task],
    succeeded: Collection[str],
    running: Collection[str],
    room: Mapping[str, int],
    failed: Collection[str] = (),
) -> list[Task]:
    """The tasks to begin now, in order. `succeeded`, `running` and `failed` are names of tasks; all others have not begun."""
    by_name = {task.name: task for task in tasks}
    lost = set(failed)
    while more := {task.name for task in tasks if task.name not in lost and task.needs & lost}:
        lost |= more
    active = [by_name[name] for name in running]
    if any(task.alone for task in active):
        return []
    waiting = [task for task in tasks if task.name not in succeeded and task.name not in running and task.name not in lost]
    ready = sorted((task for task in waiting if task.needs <= set(succeeded)), key=lambda task: -task.seconds)
    beside = [task for task in waiting if not task.alone]
    if not beside and not active:
        return ready[:1]
    used = Counter(task.place for task in active)
    groups = {task.group for task in active if task.group}
    chosen = []
    for task in ready:
        if not task.alone and used[task.place] < room[task.place] and task.group not in groups:
            chosen.append(task)
            used[task.place] += 1
            groups |= {task.group} if task.group else set()
    return chosen


def check(tasks: Sequence[Task]) -> None:
    """Refuses a plan that could not end: unknown needs, circles, two tasks of one name."""
    names = Counter(task.name for task in tasks)
    if twice := [name for name, count in names.items() if count > 1]:
        raise ValueError(f"two tasks have one name: {twice}")
    for task in tasks:
        if unknown := task.needs - set(names):
            raise ValueError(f"{task.name} needs what is not in the plan: {sorted(unknown)}")
    beside = {task.name for task in tasks if not task.alone}
    for task in tasks:
        if not task.alone and task.needs - beside:
            raise ValueError(f"{task.name} waits for what runs alone")
    done: set[str] = set()
    while len(done) < len(tasks):
        free = {task.name for task in tasks if task.needs <= done} - done
        if not free:
            raise ValueError(f"these wait for each other: {sorted(set(names) - done)}")
        done |= free
