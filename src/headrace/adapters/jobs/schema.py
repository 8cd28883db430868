"""The tables of a file of jobs, and whether a file is one that this version can go on with.

One row for each job: what queries need as columns, all that was asked as one packed record. Bodies and
results are rows of their own, so that looking for work reads none of them. What is counted is counted by
triggers, whichever statement moves a job.
"""

import os
import sqlite3
from pathlib import Path

from headrace.ports.jobs import Limits, StoreFaultError
from headrace.units import MIB

VERSION = 2
"""Of the tables; a file of an older one is brought up to it, one of a newer one refused, unchanged."""
_APPLICATION = 0x48_52_4A_51
"""Marks a file as ours: HRJQ."""
_MODE = 0o600
_WAL_BYTES = 64 * MIB
"""To what size the log is cut once it has been larger."""

_TABLES = """
create table job (
  seq integer primary key autoincrement,
  id text not null unique,
  tenant text not null,
  slo_class text not null,
  model text not null,
  key text,
  batch text,
  print blob not null,
  priority integer not null,
  deadline_ns integer not null,
  spec blob not null,
  state text not null,
  attempts integer not null,
  lost integer not null,
  owner text,
  lease_until_ns integer,
  cancel_asked integer not null,
  ended_ns integer,
  kept_until_ns integer
);
create unique index job_key on job (tenant, key) where key is not null;
create index job_turn on job (model, tenant, slo_class, priority, deadline_ns, seq)
  where state = 'queued';
create index job_due on job (deadline_ns) where state = 'queued';
create index job_age on job (seq) where state = 'queued';
create index job_lease on job (lease_until_ns) where state = 'claimed';
create index job_kept on job (kept_until_ns) where kept_until_ns is not null;
create index job_page on job (tenant, seq);
create index job_batch on job (tenant, batch, seq) where batch is not null;

create table body (seq integer primary key, bytes blob not null);
create table result (seq integer primary key, packed blob not null);

create table tally (
  model text not null,
  state text not null,
  tenant text not null,
  slo_class text not null,
  jobs integer not null,
  primary key (model, state, tenant, slo_class)
) without rowid;
create index tally_tenant on tally (tenant, state);

create trigger job_came after insert on job begin
  insert into tally values (new.model, new.state, new.tenant, new.slo_class, 1)
    on conflict do update set jobs = jobs + 1;
end;
create trigger job_moved after update of state on job when old.state <> new.state begin
  insert into tally values (new.model, new.state, new.tenant, new.slo_class, 1)
    on conflict do update set jobs = jobs + 1;
  update tally set jobs = jobs - 1 where model = old.model and state = old.state
    and tenant = old.tenant and slo_class = old.slo_class;
  delete from tally where model = old.model and state = old.state
    and tenant = old.tenant and slo_class = old.slo_class and jobs = 0;
end;
create trigger job_went after delete on job begin
  update tally set jobs = jobs - 1 where model = old.model and state = old.state
    and tenant = old.tenant and slo_class = old.slo_class;
  delete from tally where model = old.model and state = old.state
    and tenant = old.tenant and slo_class = old.slo_class and jobs = 0;
end;

create table memory (model text primary key, packed blob not null) without rowid;
create table owed (
  model text not null,
  tenant text not null,
  slo_class text not null,
  service integer not null,
  primary key (model, tenant, slo_class)
) without rowid;
"""

_FILES = """
create table file (
  seq integer primary key autoincrement,
  id text not null unique,
  tenant text not null,
  purpose text not null,
  state text not null,
  name text not null,
  bytes integer not null,
  created_ns integer not null,
  until_ns integer not null
);
create index file_page on file (tenant, state, seq);
create index file_until on file (until_ns);
create table piece (
  file integer not null,
  nth integer not null,
  bytes blob not null,
  primary key (file, nth)
);

create table batch (
  seq integer primary key autoincrement,
  id text not null unique,
  tenant text not null,
  key text,
  input text not null,
  stage text not null,
  reads integer not null,
  lines_left integer not null,
  owner text,
  lease_until_ns integer,
  term integer not null,
  turn_ns integer not null,
  kept_until_ns integer,
  packed blob not null
);
create unique index batch_key on batch (tenant, key) where key is not null;
create index batch_page on batch (tenant, seq);
create index batch_turn on batch (turn_ns) where kept_until_ns is null;
create index batch_kept on batch (kept_until_ns) where kept_until_ns is not null;
create index batch_input on batch (input) where reads = 1;

create index job_of_batch on job (batch, state, seq) where batch is not null;
create table batch_tally (
  batch text not null,
  state text not null,
  jobs integer not null,
  primary key (batch, state)
) without rowid;
create trigger batch_came after insert on job when new.batch is not null begin
  insert into batch_tally values (new.batch, new.state, 1)
    on conflict do update set jobs = jobs + 1;
end;
create trigger batch_moved after update of state on job
when old.state <> new.state and new.batch is not null begin
  insert into batch_tally values (new.batch, new.state, 1)
    on conflict do update set jobs = jobs + 1;
  update batch_tally set jobs = jobs - 1 where batch = old.batch and state = old.state;
  delete from batch_tally where batch = old.batch and state = old.state and jobs = 0;
end;
create trigger batch_went after delete on job when old.batch is not null begin
  update batch_tally set jobs = jobs - 1 where batch = old.batch and state = old.state;
  delete from batch_tally where batch = old.batch and state = old.state and jobs = 0;
end;
"""

_SCRIPTS = (_TABLES, _FILES)
"""What makes each version of the one before."""


def opened(path: Path, limits: Limits, busy_ms: int) -> sqlite3.Connection:
    """Return a connection to a file of jobs, made if it is not there, for its owner's eyes alone.

    Raises `StoreFaultError` for a file that is something else or of another version, `sqlite3.Error` and
    OSError where it cannot be had.
    """
    os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, _MODE))
    connection = sqlite3.connect(
        path, timeout=busy_ms / 1_000, isolation_level=None, check_same_thread=False
    )
    try:
        _check(connection, path)
        path.chmod(_MODE)  # the log and its index take the mode of the file
        _set(connection, limits)
        _make(connection, path)
    except BaseException:
        connection.close()
        raise
    return connection


def _set(connection: sqlite3.Connection, limits: Limits) -> None:
    for setting in (
        "journal_mode = wal",
        "secure_delete = on",  # what is purged is no longer to be read in the file
        f"journal_size_limit = {_WAL_BYTES}",
    ):
        connection.execute(f"pragma {setting}")
    page = int(connection.execute("pragma page_size").fetchone()[0])
    connection.execute(f"pragma max_page_count = {max(1, limits.store_bytes // page)}")


def _check(connection: sqlite3.Connection, path: Path) -> None:
    """Refuse a file that is not ours, before anything of it is changed."""
    application, version = _marks(connection)
    if application == _APPLICATION and version not in range(1, VERSION + 1):
        raise StoreFaultError(
            f"{path}: its tables are of version {version}, this program's are of {VERSION}"
        )
    if application != _APPLICATION and not _is_empty(connection):
        raise StoreFaultError(f"{path} is no file of jobs")


def _marks(connection: sqlite3.Connection) -> tuple[int, int]:
    application = int(connection.execute("pragma application_id").fetchone()[0])
    return application, int(connection.execute("pragma user_version").fetchone()[0])


def _is_empty(connection: sqlite3.Connection) -> bool:
    return connection.execute("select 1 from sqlite_master limit 1").fetchone() is None


def _make(connection: sqlite3.Connection, path: Path) -> None:
    """Make the tables that are not there yet, unless another process did meanwhile."""
    connection.execute("begin immediate")
    try:
        _check(connection, path)
        had = 0 if _is_empty(connection) else _marks(connection)[1]
        for script in _SCRIPTS[had:]:
            for statement in _statements(script):
                connection.execute(statement)
        if had < VERSION:
            connection.execute(f"pragma application_id = {_APPLICATION}")
            connection.execute(f"pragma user_version = {VERSION}")
        connection.execute("commit")
    except BaseException:
        if connection.in_transaction:
            connection.execute("rollback")
        raise


def _statements(script: str) -> list[str]:
    """Return the statements of a script; `executescript` would commit before it."""
    found, statement = [], ""
    for line in script.splitlines(keepends=True):
        statement += line
        if sqlite3.complete_statement(statement):
            found.append(statement)
            statement = ""
    return found
