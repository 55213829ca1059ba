-- Data keys: one for each tenant, principal and month, wrapped by a master key that is not in the database.
--
-- Private content of the journal is ciphertext under these keys. Deleting a row erases, for good and in every backup of
-- the journal, all content that was sealed under it; the events stay. The principal is a keyed digest, not a name.

create table data_keys (
    id text primary key,
    tenant text not null,
    principal_digest text not null,
    month text not null check (month ~ '^\d{4}-\d{2}$'),
    wrapped bytea not null,
    made_at timestamptz not null default clock_timestamp(),
    unique (tenant, principal_digest, month)
);

-- Members of hermes_application make, read and delete keys and never change one.
do $roles$
begin
    if exists (select from pg_roles where rolname = 'hermes_application') and
        (select rolsuper from pg_roles where rolname = current_user) then
        grant select, insert, delete on data_keys to hermes_application;
    end if;
end;
$roles$;
