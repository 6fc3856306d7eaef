"""Pipelines: schedules of actions that are proven, priced and drawn.

A pipeline cuts a model into stages, one after another, and the batch into microbatches.  Each rank
executes the actions of its stages: forwards and backwards of microbatches::

    schedule = rr.pipeline.schedule("1f1b", ranks=4, splits=8)
    print(rr.pipeline.draw(schedule))
    proof = rr.pipeline.prove(schedule)

`register` adds a schedule, and `balance` cuts layers into stages.  Nothing here sends a message.
`lower` returns what each rank sends and receives between its actions.
"""

from ringreduce.pipeline.actions import Action
from ringreduce.pipeline.cut import balance
from ringreduce.pipeline.definition import PipelineSchedule
from ringreduce.pipeline.lowering import Payload, lower
from ringreduce.pipeline.picture import to_png, to_svg
from ringreduce.pipeline.proof import PipelineProof, prove
from ringreduce.pipeline.registry import register, schedule
from ringreduce.pipeline.text import draw
from ringreduce.pipeline.timing import Costs, Timeline, price, timeline

__all__ = [
    "Action",
    "Costs",
    "Payload",
    "PipelineProof",
    "PipelineSchedule",
    "Timeline",
    "balance",
    "draw",
    "lower",
    "price",
    "prove",
    "register",
    "schedule",
    "timeline",
    "to_png",
    "to_svg",
]
