"""Messages through a channel whose peer ends at a bad moment."""

from __future__ import annotations

import numpy as np

from ringreduce.point_to_point.by_transport import _ANSWER, _ANSWER_HEAD, _READY, TransportRoad
from ringreduce.point_to_point.road import DtypeAndShape
from ringreduce.transports.base import lost


class LostSend:
    """A send to a rank that has ended.  It does not start, so a test finds nothing under way."""

    def Start(self):  # noqa: N802 - mpi4py's name
        raise lost([1])

    def Test(self):  # noqa: N802 - mpi4py's name
        return True

    def Free(self):  # noqa: N802 - mpi4py's name
        pass


class Channel:
    """A channel to rank 1, which gets ready for message 1 and ends."""

    rank, size = 0, 2

    def __init__(self):
        self.arrived = []

    def post(self, peer, envelope):
        self.arrived = [_ANSWER_HEAD.pack(_ANSWER, 1, _READY)]

    def poll(self, peer):
        arrived, self.arrived = self.arrived, []
        return arrived

    def sender(self, peer, flow, buffer):
        return LostSend()

    def translate(self, error):
        return error


def test_long_data_that_cannot_start_are_not_taken():
    road, data = TransportRoad(Channel()), np.zeros(100_000)
    assert road.offer(1, DtypeAndShape.of(data.dtype, data.shape), 0, data) == 1
    assert list(road.answers(1)) == []
    assert "rank 1 is lost" in road.lost(1)
