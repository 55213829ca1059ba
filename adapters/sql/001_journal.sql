-- The journal: one table of events in commit order, and the one function that appends to it.
--
-- Table, index and row type are those of eventsourcing's application recorder with text ids, so its recorder, log
-- and subscription work beside append_events. Every object lands in the first schema of the migration's search path.

create table stored_events (
    originator_id text not null,
    originator_version bigint not null,
    topic text,
    state bytea,
    notification_id bigserial,
    primary key (originator_id, originator_version)
) with (
    autovacuum_enabled = true,
    autovacuum_vacuum_threshold = 100000000,
    autovacuum_vacuum_scale_factor = 0.5,
    autovacuum_analyze_threshold = 1000,
    autovacuum_analyze_scale_factor = 0.01
);

create unique index stored_events_notification_id_idx on stored_events (notification_id asc);

create type stored_event_text as (originator_id text, originator_version bigint, topic text, state bytea);

-- Appends a batch of commands in one transaction; each command stands or falls alone.
--
-- c_... hold one element for each command: the fence a decision stands under (null for an observation) and its
-- sequence; the fence history a takeover advances and the sequence it must find there; the last moment at which
-- the command may be stored; its number of events. e_... hold one element for each event, in command order.
--
-- verdicts: 0 stored now, 1 stored before with the same bytes, 2 other bytes at one of its keys, 3 a newer sequence
-- is stored, 4 its sequence is not stored, 5 too late, 6 some of its rows are stored and others are not.
-- positions: the last notification id of a command stored before. ids: those of the rows stored now, in order.
-- A command without events is stored before, vacuously: it makes this commit confirm what was only read.
create function append_events(
    c_fence text[], c_sequence bigint[], c_advanced text[], c_expected bigint[], c_not_after timestamptz[],
    c_size integer[],
    e_command integer[], e_history text[], e_version bigint[], e_topic text[], e_state bytea[],
    out verdicts integer[], out positions bigint[], out ids bigint[]
)
language plpgsql volatile
set search_path from current
set enable_seqscan = off
set enable_hashjoin = off
set enable_mergejoin = off
set plan_cache_mode = force_generic_plan
as $body$
declare
    n_taken integer[] := array_fill(0, array[cardinality(c_size)]);
    n_same integer[] := n_taken;
    f_history text[];
    f_current bigint[];
    hit record;
begin
    -- isolation: in any other the checks below would see a snapshot from before the locks
    if current_setting('transaction_isolation') <> 'read committed' then
        raise exception 'append_events needs read committed' using errcode = 'object_not_in_prerequisite_state';
    end if;

    -- locks: the first excludes writers that lock the table, the second orders those that call this function
    lock table stored_events in row exclusive mode;
    perform pg_advisory_xact_lock(1751478637, 'stored_events'::regclass::oid::integer);

    -- identity: which keys are there already, and with which bytes
    positions := array_fill(0::bigint, array[cardinality(c_size)]);
    for hit in
        select e.command, s.notification_id, s.topic = e.topic and s.state = e.state as same
        from unnest(e_command, e_history, e_version, e_topic, e_state) as e(command, history, version, topic, state)
        join stored_events s on s.originator_id = e.history and s.originator_version = e.version
    loop
        n_taken[hit.command] := n_taken[hit.command] + 1;
        if hit.same then
            n_same[hit.command] := n_same[hit.command] + 1;
        end if;
        positions[hit.command] := greatest(positions[hit.command], hit.notification_id);
    end loop;

    -- fences: the current sequence of each fence history of the batch, 0 where there is none
    select array_agg(f.history), array_agg(coalesce(
        (select max(s.originator_version) from stored_events s where s.originator_id = f.history), 0))
    into f_history, f_current
    from (select distinct unnest(c_fence || c_advanced) as history) f
    where f.history is not null;

    -- verdicts: identity before the fence, the fence before taken keys; each refusal but 4 stays true for ever
    select array_agg(case
        when c.same = c.size then 1
        when f_current[array_position(f_history, c.fence)] > c.sequence then 3
        when f_current[array_position(f_history, c.fence)] < c.sequence then 4
        when f_current[array_position(f_history, c.advanced)] > c.expected then 3
        when f_current[array_position(f_history, c.advanced)] < c.expected then 4
        when c.same > 0 then 6
        when c.taken > 0 then 2
        when clock_timestamp() > c.not_after then 5
        else 0 end order by c.place)
    into verdicts
    from unnest(c_fence, c_sequence, c_advanced, c_expected, c_not_after, c_size, n_taken, n_same)
        with ordinality as c(fence, sequence, advanced, expected, not_after, size, taken, same, place);

    -- one insert, in command order: ids rise as the commands stand
    with stored as (
        insert into stored_events (originator_id, originator_version, topic, state)
        select e.history, e.version, e.topic, e.state
        from unnest(e_command, e_history, e_version, e_topic, e_state)
            with ordinality as e(command, history, version, topic, state, place)
        where verdicts[e.command] = 0
        order by e.place
        returning notification_id
    )
    select array_agg(notification_id order by notification_id) into ids from stored;

    -- notify, or confirm: a transaction that writes nothing does not wait for the standby
    if ids is not null then
        notify stored_events;
    elsif 1 = any(verdicts) then
        perform pg_logical_emit_message(true, 'confirm', '');
    end if;
end;
$body$;

revoke all on function append_events from public;

-- Where roles may be made: the function runs as an owner that cannot log in and can only read and insert;
-- members of hermes_application read events and append through the function, and can change none.
do $roles$
declare
    home text := current_schema();
begin
    if not (select rolsuper from pg_roles where rolname = current_user) then
        return;
    end if;
    begin
        create role hermes_journal nologin bypassrls;
    exception when duplicate_object or unique_violation then null;
    end;
    begin
        create role hermes_application nologin;
    exception when duplicate_object or unique_violation then null;
    end;
    execute format('grant usage on schema %I to hermes_journal, hermes_application', home);
    grant select, insert on stored_events to hermes_journal;
    grant usage on sequence stored_events_notification_id_seq to hermes_journal;
    grant select on stored_events to hermes_application;
    alter function append_events owner to hermes_journal;
    alter function append_events security definer;
    grant execute on function append_events to hermes_application;
end;
$roles$;
