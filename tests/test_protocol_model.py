"""A model of the exchange, explored exhaustively: mixtures of protocols in one region.

A state is what every rank has reached, what lies in the slots and which stores are under way. Two
kinds of events come in any order: a store arrives, and a rank ends its launch. Everything else
happens as early as it can or, where that is worse, as late:

- Pushes are issued at once; each arrives at any time after.
- Polls succeed as soon as their word is there, which lets later pushes out early.
- Restores are done at the end of the launch. A rank may be arbitrarily slow to end it.

A word that arrives where another still lies, a word that is not the one meant, and a state in which
nothing can happen are faults.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import product
from typing import NamedTuple

import pytest

from cupy_moe_ar.plan import share_of

EMPTY = None
Word = tuple[int, str, int, int]  # launch, kind, writer, token


class Push(NamedTuple):
    to: int
    slot: int
    word: Word


class Poll(NamedTuple):
    slot: int
    word: Word


Program = list[Push | Poll]
Kind = tuple[str, int]  # protocol, tokens


class ProtocolError(AssertionError):
    """The protocol went wrong."""


def oneshot(size: int, tokens: int, rank: int, launch: int) -> Program:
    program: Program = []
    peers = [peer for peer in range(size) if peer != rank]
    for token in range(tokens + 1):
        if token < tokens:
            word = (launch, "part", rank, token)
            program += [Push(peer, rank * tokens + token, word) for peer in peers]
        done = token - 1
        if done >= 0:
            program += [Poll(peer * tokens + done, (launch, "part", peer, done)) for peer in peers]
    return program


def owned(
    size: int, tokens: int, rank: int, launch: int, sums: bool, gathers: bool, greets: bool
) -> Program:
    """Two-shot and its halves as one cluster runs them, in the order of twoshot.cu's run_rows."""
    shares = [share_of(owner, size, tokens) for owner in range(size)]
    rows = len(shares[0])
    totals = size * rows if sums else 0  # their first slot
    peers = [peer for peer in range(size) if peer != rank]
    shots = 2 if sums and gathers else 1
    program: Program = []

    def item(step: int) -> tuple[int, int, int] | None:
        """Owner, row in its share, token: or the token's number of a greeting."""
        if not 0 <= step < rows * size:
            return None
        row, owner = divmod(step, size)
        if row < len(shares[owner]):
            return owner, row, shares[owner][row]
        return (owner, row, owner) if greets and not shares[owner] else None

    def push_total(token: int) -> Program:
        return [Push(peer, totals + token, (launch, "total", rank, token)) for peer in peers]

    for step in range(rows * size + shots):
        if found := item(step):
            owner, row, token = found
            if owner != rank and sums:
                program.append(Push(owner, rank * rows + row, (launch, "part", rank, token)))
            elif owner == rank and not sums:
                program += push_total(token)
        if (found := item(step - 1)) and found[0] == rank and sums:
            _, row, token = found
            program += [Poll(peer * rows + row, (launch, "part", peer, token)) for peer in peers]
            program += push_total(token) if gathers else []
        if (found := item(step - shots)) and found[0] != rank and gathers:
            owner, _, token = found
            program.append(Poll(totals + token, (launch, "total", owner, token)))
    return program


def program(size: int, kind: Kind, rank: int, launch: int, greets: bool = True) -> Program:
    protocol, tokens = kind
    if protocol == "oneshot":
        return oneshot(size, tokens, rank, launch)
    sums, gathers = protocol != "allgather", protocol != "reduce_scatter"
    return owned(size, tokens, rank, launch, sums, gathers, greets and not (sums and gathers))


def explore(
    size: int, kinds: Iterable[Kind], *, epochs: int = 2, restores: bool = True, greets: bool = True
) -> int:
    """Go through every state of a sequence of launches; return their number."""
    kinds = list(kinds)
    programs = [
        [program(size, kind, rank, launch, greets) for launch, kind in enumerate(kinds)]
        for rank in range(size)
    ]
    assert all(_balanced(size, [programs[r][n] for r in range(size)]) for n in range(len(kinds)))

    def settle(
        at: list[tuple[int, int]], slots: dict[tuple[int, int, int], Word], flying: set[Push]
    ) -> None:
        """Let every rank issue what it can and poll what is there."""
        for rank in range(size):
            launch, step = at[rank]
            if launch == len(kinds):
                continue
            steps = programs[rank][launch]
            while step < len(steps):
                what = steps[step]
                if isinstance(what, Push):
                    flying.add(what)
                else:
                    word = slots.get((rank, launch % epochs, what.slot), EMPTY)
                    if word is EMPTY:
                        break
                    if word != what.word:
                        raise ProtocolError(f"rank {rank} takes {word} for {what.word}")
                step += 1
            at[rank] = (launch, step)

    def successors(state: State) -> Iterable[State]:
        at, slots, flying = state
        for push in flying:
            place = (push.to, push.word[0] % epochs, push.slot)
            found = dict(slots)
            if place in found:
                raise ProtocolError(f"{push.word} arrives where {found[place]} lies")
            found[place] = push.word
            yield _next(settle, at, found, flying - {push})
        for rank in range(size):
            launch, step = at[rank]
            if launch < len(kinds) and step == len(programs[rank][launch]):
                found = dict(slots)
                for what in programs[rank][launch]:
                    if isinstance(what, Poll) and restores:
                        del found[rank, launch % epochs, what.slot]
                ended = list(at)
                ended[rank] = (launch + 1, 0)
                yield _next(settle, tuple(ended), found, flying)

    first = _next(settle, ((0, 0),) * size, {}, frozenset())
    seen, open_states = {first}, [first]
    while open_states:
        state = open_states.pop()
        following = list(successors(state))
        if not following and any(launch < len(kinds) for launch, _ in state[0]):
            raise ProtocolError(f"nothing can happen: {state}")
        for other in following:
            if other not in seen:
                seen.add(other)
                open_states.append(other)
    return len(seen)


State = tuple[
    tuple[tuple[int, int], ...], frozenset[tuple[tuple[int, int, int], Word]], frozenset[Push]
]


def _next(
    settle: Callable[..., None],
    at: tuple[tuple[int, int], ...],
    slots: dict[tuple[int, int, int], Word],
    flying: Iterable[Push],
) -> State:
    places, under_way = list(at), set(flying)
    settle(places, slots, under_way)
    return tuple(places), frozenset(slots.items()), frozenset(under_way)


def _balanced(size: int, programs: list[Program]) -> bool:
    """Words pushed into a rank = words that it polls, each slot once."""
    for rank in range(size):
        pushed = [(what.slot, what.word) for other in programs for what in other
                  if isinstance(what, Push) and what.to == rank]  # fmt: skip
        polled = [(what.slot, what.word) for what in programs[rank] if isinstance(what, Poll)]
        if sorted(pushed) != sorted(polled) or len({slot for slot, _ in polled}) != len(polled):
            return False
    return True


HALVES = [("reduce_scatter", 1), ("allgather", 1)]
KINDS: dict[int, list[Kind]] = {
    2: [("oneshot", 1), ("oneshot", 2), ("twoshot", 1), ("twoshot", 3), *HALVES,
        ("reduce_scatter", 3), ("allgather", 2)],
    3: [("oneshot", 1), ("twoshot", 1), ("twoshot", 2), *HALVES],
}  # fmt: skip
FAULT = "arrives where|takes"


@pytest.mark.parametrize("size", KINDS)
def test_any_four_launches_in_turn(size: int) -> None:
    """Every other one shares an epoch; what stands between two must keep them apart."""
    states = sum(explore(size, kinds) for kinds in product(KINDS[size], repeat=4))
    assert states > 100_000


def test_ragged_shares_of_three() -> None:
    for kinds in product([("twoshot", 4), ("oneshot", 1), ("reduce_scatter", 2)], repeat=3):
        explore(3, kinds)


@pytest.mark.parametrize("size", KINDS)
@pytest.mark.parametrize("kind", [("oneshot", 1), ("twoshot", 1), ("twoshot", 2), *HALVES])
def test_one_epoch_gives_wrong_words(size: int, kind: Kind) -> None:
    with pytest.raises(ProtocolError, match=FAULT):
        explore(size, [kind] * 3, epochs=1)


@pytest.mark.parametrize("kind", [("oneshot", 1), ("twoshot", 2)])
def test_words_that_stay_are_hit(kind: Kind) -> None:
    with pytest.raises(ProtocolError, match=FAULT):
        explore(2, [kind] * 3, restores=False)


@pytest.mark.parametrize("size", KINDS)
@pytest.mark.parametrize("kind", HALVES)
def test_halves_without_greetings_run_away(size: int, kind: Kind) -> None:
    with pytest.raises(ProtocolError, match=FAULT):
        explore(size, [kind] * 3, greets=False)
