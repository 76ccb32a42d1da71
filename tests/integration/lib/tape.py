"""Reads a shard's record of rounds (syncer/store/store.h has the tables)."""
import pathlib
import sqlite3
from typing import NamedTuple


class Round(NamedTuple):
    fragment: int
    version: int
    round: int
    epoch: int
    hash: str


class Participant(NamedTuple):
    round: int
    fragment: int
    version: int
    learner: int
    uid: str
    nonce: str
    step: int
    base_version: int
    steps: int
    tokens: int
    weight: float


class Tape(NamedTuple):
    rounds: list        # Merges, in order; first states (version 1) are left out.
    participants: list  # Of merges.
    totals: dict


def read_tape(folder):
    (path,) = pathlib.Path(folder).glob("*.db")
    base = sqlite3.connect(f"file:{path}?mode=ro", uri=True)
    base.row_factory = sqlite3.Row
    rounds = [Round(*row) for row in base.execute(
        "select fragment, version, round, epoch, hash from commits where version > 1 order by round")]
    participants = [Participant(*row) for row in base.execute(
        "select c.round, p.fragment, p.version, p.learner, p.uid, p.nonce, p.step, p.base_version, p.steps, p.tokens,"
        " p.weight from participants p join commits c using(fragment, version) where p.version > 1 order by c.round, p.learner")]
    totals = base.execute("select * from totals").fetchone()
    return Tape(rounds, participants, dict(totals) if totals else {})
