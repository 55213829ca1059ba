-- Stored views: rows folded from the journal, and the position up to which they are folded.
--
-- A view has one live generation; a rebuild fills the next one beside it and then makes that the live one. Everything in
-- these tables can be made again from the journal. Private content in `doc` is the journal's own ciphertext.

create table view_places (
    view text not null,
    generation integer not null,
    version integer not null,
    position bigint not null default 0,
    live boolean not null default false,
    read_at timestamptz,
    primary key (view, generation)
);

create unique index view_places_live_idx on view_places (view) where live;

-- An empty text in a facet means that the row has nothing there; `listed` is false for rows that are in no list.
create table view_rows (
    view text not null,
    generation integer not null,
    key text not null,
    position bigint not null,
    listed boolean not null,
    tenant text not null,
    state text not null,
    principal text not null,
    capability_id text not null,
    endpoint_id text not null,
    session text not null,
    run_id text not null,
    approval_id text not null,
    approval text not null,
    reason text not null,
    person text not null,
    open boolean not null,
    needed boolean not null,
    at timestamptz,
    doc bytea not null,
    primary key (view, generation, key)
) with (autovacuum_vacuum_scale_factor = 0.05, autovacuum_analyze_threshold = 1000);

create index view_rows_position_idx on view_rows (view, generation, tenant, position) where listed;
create index view_rows_state_idx on view_rows (view, generation, tenant, state, position) where listed;
create index view_rows_principal_idx on view_rows (view, generation, tenant, principal, position) where listed;
create index view_rows_session_idx on view_rows (view, generation, tenant, session, position)
    where listed and session <> '';
create index view_rows_run_idx on view_rows (view, generation, tenant, run_id, position) where listed and run_id <> '';
create index view_rows_approval_idx on view_rows (view, generation, tenant, approval_id)
    where listed and approval_id <> '';
create index view_rows_approvals_idx on view_rows (view, generation, tenant, position) where listed and approval <> '';
create index view_rows_open_idx on view_rows (view, generation, position) where listed and open;
create index view_rows_reason_idx on view_rows (view, generation, tenant, position) where listed and reason <> '';
create index view_rows_person_idx on view_rows (view, generation, tenant, position) where listed and person <> '';
create index view_rows_needed_idx on view_rows (view, generation, tenant, position) where listed and needed;

-- How many listed rows have these facets, so that a list knows its size without visiting it.
create table view_counts (
    view text not null,
    generation integer not null,
    tenant text not null,
    state text not null,
    principal text not null,
    capability_id text not null,
    endpoint_id text not null,
    approval text not null,
    reason text not null,
    person text not null,
    n bigint not null,
    primary key (view, generation, tenant, state, principal, capability_id, endpoint_id, approval, reason, person)
);

-- Histories that a view holds: from this version on nothing of them is folded, because this event cannot be.
create table view_faults (
    view text not null,
    generation integer not null,
    history text not null,
    version bigint not null,
    position bigint not null,
    topic text not null,
    reason text not null,
    primary key (view, generation, history)
);

do $roles$
begin
    if exists (select from pg_roles where rolname = 'hermes_application') and
        (select rolsuper from pg_roles where rolname = current_user) then
        grant select, insert, update, delete on view_places, view_rows, view_counts, view_faults to hermes_application;
    end if;
end;
$roles$;
