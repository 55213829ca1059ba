"""What an ordinary user, and only one, is refused."""

import os
import pwd

import pytest

from adapters.postgres import EmbeddedPostgres, PostgresError
from tests.pg import state_folder

pytestmark = pytest.mark.postgres


def test_only_root_runs_the_server_as_another_account():
    with state_folder() as state:
        with pytest.raises(PostgresError, match="only root") as caught:
            EmbeddedPostgres(state, account="root").start()
        assert caught.value.code == "postgres.account"
        assert not state.exists()


def test_our_own_account_may_be_named():
    with state_folder() as state:
        own = pwd.getpwuid(os.geteuid()).pw_name
        with EmbeddedPostgres(state, account=own, fsync=False) as server:
            assert server.data_dir.stat().st_uid == os.geteuid()


def test_a_state_folder_that_is_closed_to_us_is_named_and_left_alone():
    with state_folder() as state:
        state.mkdir(mode=0o500)
        with pytest.raises(PostgresError, match=str(state)) as caught:
            EmbeddedPostgres(state).start()
        assert caught.value.code == "postgres.account"
        assert state.stat().st_mode & 0o777 == 0o500


def test_the_programs_are_not_copied_for_an_ordinary_user():
    with state_folder() as state, EmbeddedPostgres(state, fsync=False):
        assert sorted(path.name.partition("-")[0] for path in state.iterdir()) == [
            "owner.lock",
            "postgres",
            "postgres.log",
            "socket",
        ]
