"""A run is cut into slices that hold everything that rests, once and in order."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from redrive.api.replay import PartitionEnd, Snapshot
from redrive.replay import slices
from redrive.replay.position import EntryId
from redrive.replay.slices import Slice, cut, rounds, whole
from redrive.replay.snapshot import Acknowledged, Partition

ledgers = st.dictionaries(st.integers(0, 50), st.integers(1, 30), max_size=6).map(
    lambda counts: tuple(sorted(counts.items()))
)


def entries(partition: Partition) -> list[EntryId]:
    return [EntryId(ledger, n) for ledger, count in partition.ledgers for n in range(count)]


def entries_of(piece: Slice, partition: Partition) -> list[EntryId]:
    return [entry for entry in entries(partition) if piece.first <= entry <= piece.last]


@given(ledgers, st.tuples(st.integers(0, 50), st.integers(-1, 30)), st.data())
def test_slices_hold_what_is_open_and_not_past_the_end(
    counts: tuple[tuple[int, int], ...], through: tuple[int, int], data: st.DataObject
) -> None:
    done = EntryId(*through)
    partition = Partition(0, counts, Acknowledged(done))
    everything = entries(partition)
    end = data.draw(st.sampled_from(everything)) if everything else partition.end
    size = data.draw(st.integers(1, 40))

    pieces = cut(partition, end, size)

    held = [entry for piece in pieces for entry in entries_of(piece, partition)]
    assert held == [entry for entry in everything if done < entry <= end]
    assert all(len(entries_of(piece, partition)) == size for piece in pieces[:-1])
    assert all(0 < len(entries_of(piece, partition)) <= size for piece in pieces)


def test_the_whole_is_one_slice_of_each_partition_that_belongs_to_the_run() -> None:
    partitions = [Partition(index, ((3, 10), (5, 10))) for index in range(3)]
    bounds = Snapshot(
        partitions=(PartitionEnd(partition=0, end="5:4"), PartitionEnd(partition=1, end="-1:-1")),
        target_partitions=2,
    )
    assert whole(partitions, bounds) == [Slice(0, EntryId(3, 0), EntryId(5, 4))]


def test_rounds_take_one_slice_of_every_partition_until_the_longest_is_done() -> None:
    size = slices.SLICE_ENTRIES
    partitions = [Partition(0, ((3, 2 * size),)), Partition(1, ((4, size + 1),)), Partition(2, ())]
    ends = tuple(PartitionEnd(partition=p.index, end=str(p.end)) for p in partitions)
    bounds = Snapshot(partitions=ends, target_partitions=0)
    assert list(rounds(partitions, bounds)) == [
        [
            Slice(0, EntryId(3, 0), EntryId(3, size - 1)),
            Slice(1, EntryId(4, 0), EntryId(4, size - 1)),
        ],
        [
            Slice(0, EntryId(3, size), EntryId(3, 2 * size - 1)),
            Slice(1, EntryId(4, size), EntryId(4, size)),
        ],
    ]


def test_an_option_of_the_source_gives_back_the_slices_written_into_it() -> None:
    pieces = [Slice(-1, EntryId(3, 0), EntryId(5, 4)), Slice(2, EntryId(0, 7), EntryId(0, 7))]
    assert slices.decode(slices.encode(pieces)) == pieces
