"""What an evaluation's tasks are called for a reader; the raw name stays beside it, since `--task` takes that one.

Knows the texts; knows no engine.
"""

from __future__ import annotations

from app.texts import all_texts, text


def task_name(task: str, lang: str) -> str:
    """The name of a task for a reader; one that has no text keeps its own."""
    return all_texts(lang).get(f"tasks.{task.replace('-', '_')}", task)


def task_label(task: str, lang: str) -> str:
    """The name with the raw one in parentheses; an unknown task as it is."""
    name = task_name(task, lang)
    return task if name == task else text(lang, "analysis.task_named", name=name, task=task)
