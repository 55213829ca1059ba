-- Members of hermes_application see which migrations are applied, so that a host starts under a role that owns nothing.

do $roles$
begin
    if exists (select from pg_roles where rolname = 'hermes_application') and
        (select rolsuper from pg_roles where rolname = current_user) then
        grant select on schema_migrations to hermes_application;
    end if;
end;
$roles$;
