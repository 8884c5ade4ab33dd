//! The rights that a program needs.

use semel::{Scope, prelude::*};
use semel_testkit::key;
use sqlx::{AssertSqlSafe, Connection as _, PgConnection, Row as _};

use super::{Place, answer, publish, refused, run};

/// A role without rights, and a connection as it.
struct Role {
    name: String,
    admin: PgConnection,
    conn: PgConnection,
}

impl Role {
    async fn new(place: &Place) -> Self {
        let schema = place.schema().await;
        let name = format!("{schema}_shop");
        let mut admin = place.program().await;
        run(&mut admin, &format!("CREATE ROLE {name} LOGIN")).await;
        let (scheme, rest) = place.lab.url.split_once("://").unwrap();
        let url = format!("{scheme}://{name}@{}", rest.split_once('@').unwrap().1);
        Self { conn: PgConnection::connect(&url).await.unwrap(), name, admin }
    }

    /// Runs statements as the owner; $role is this role.
    async fn as_owner(&mut self, sql: &str) {
        run(&mut self.admin, &sql.replace("$role", &self.name)).await;
    }

    /// The rights of docs/sql.md.
    async fn granted(place: &Place) -> Self {
        let mut role = Self::new(place).await;
        let schema = place.schema().await;
        role.as_owner(&format!(
            "GRANT USAGE ON SCHEMA {schema} TO $role;
             GRANT EXECUTE ON FUNCTION semel_enqueue, semel_enqueue_bytes, semel_publish, semel_publish_bytes TO $role"
        ))
        .await;
        role
    }

    async fn end(mut self) {
        self.as_owner("DROP OWNED BY $role CASCADE; DROP ROLE $role").await;
    }
}

#[tokio::test]
async fn a_role_that_may_only_execute_the_functions_can_use_them_and_nothing_else() {
    let place = Place::new().await;
    let mut role = Role::granted(&place).await;
    let conn = &mut role.conn;
    for (function, arguments) in
        [("semel_enqueue", "'shop', 'mail', 'k', 'x'"), ("semel_enqueue_bytes", r"'shop', 'mail', 'k', '\x78'")]
    {
        let sql = format!("SELECT answer FROM {function}({arguments})");
        let said: String = sqlx::query_scalar(AssertSqlSafe(sql)).fetch_one(&mut *conn).await.unwrap();
        assert_eq!(said, if function == "semel_enqueue" { "enqueued" } else { "waiting" });
    }
    publish(conn, "'orders', 'x', ordering_key => 'k'").await;
    run(conn, r"SELECT semel_publish_bytes('orders', '\x00ff')").await;
    run(conn, "SELECT semel_sql_version()").await;
    for sql in [
        "SELECT * FROM semel_operations",
        "INSERT INTO semel_outbox_keys VALUES ('default', 'k', 9)",
        "DELETE FROM semel_backlog",
        "SELECT nextval('semel_fence')",
        "SELECT semel_wake('due')",
    ] {
        assert_eq!(refused(conn, sql).await.0, "42501", "{sql}");
    }
    assert_eq!(place.lab.number("SELECT count(*) FROM semel_outbox").await, 2);
    role.end().await;
}

#[tokio::test]
async fn a_role_without_the_right_to_execute_them_cannot_use_the_functions() {
    let place = Place::new().await;
    let mut role = Role::new(&place).await;
    let schema = place.schema().await;
    role.as_owner(&format!("GRANT USAGE ON SCHEMA {schema} TO $role")).await;
    for call in [
        "* FROM semel_enqueue('shop', 'mail', 'k', 'x')",
        r"* FROM semel_enqueue_bytes('shop', 'mail', 'k', '\x78')",
        "semel_publish('orders', 'x')",
        "semel_publish_bytes('orders', '')",
    ] {
        assert_eq!(refused(&mut role.conn, &format!("SELECT {call}")).await.0, "42501", "{call}");
    }
    role.end().await;
}

/// The functions run with the rights of their owner: what the caller can create must never run with these.
#[tokio::test]
async fn objects_of_the_caller_do_not_stand_in_for_those_of_the_functions() {
    let place = Place::new().await;
    let mut role = Role::granted(&place).await;
    let (own, schema) = (format!("{}_own", role.name), place.schema().await);
    // The worst case: the caller may also create functions beside ours, as in a schema called public.
    role.as_owner(&format!("CREATE SCHEMA {own} AUTHORIZATION $role; GRANT CREATE ON SCHEMA {schema} TO $role")).await;
    let conn = &mut role.conn;
    let mut traps = format!("SET search_path = {own}, {schema}, pg_catalog;");
    for at in [own.as_str(), schema.as_str()] {
        for function in [
            "sha256(BYTEA) RETURNS BYTEA",
            "int8send(INTEGER) RETURNS BYTEA",
            "nextval(TEXT) RETURNS BIGINT",
            "round(NUMERIC) RETURNS NUMERIC",
            "convert_to(TEXT, TEXT) RETURNS BYTEA",
            "pg_notify(TEXT, TEXT) RETURNS VOID",
            "format(TEXT, VARIADIC TEXT[]) RETURNS TEXT",
            "gen_random_uuid() RETURNS UUID",
        ] {
            traps += &format!(
                "CREATE FUNCTION {at}.{function} LANGUAGE plpgsql AS $$ BEGIN RAISE 'a trap, as %', current_user; END $$;"
            );
        }
    }
    traps += "CREATE TEMP TABLE semel_operations (id BIGINT); CREATE TEMP TABLE semel_outbox (id BIGINT);
              CREATE TEMP TABLE semel_epoch (epoch BIGINT)";
    run(conn, &traps).await;
    let said = answer(conn, "'shop', 'mail', 'k', 'x', max_attempts => 3, tenant => 'a'").await;
    assert_eq!(said, "enqueued");
    publish(conn, "'orders', 'x', ordering_key => 'k', headers => '{\"a\": \"b\"}'").await;
    assert_eq!(answer(conn, "'shop', 'mail', 'k', 'x', tenant => 'a'").await, "waiting");
    let path = sqlx::query("SHOW search_path").fetch_one(&mut *conn).await.unwrap();
    assert!(path.get::<String, _>(0).starts_with(&own), "the caller's settings are as before");
    assert_eq!(place.lab.number("SELECT count(*) FROM semel_outbox").await, 1);
    // The role's objects go with the lab's schema and with the role.
    role.end().await;
}

/// The pattern of docs/sql.md for a program that works for one tenant.
#[tokio::test]
async fn a_role_can_be_kept_to_one_tenant_by_a_function_of_its_own() {
    let place = Place::new().await;
    let mut role = Role::new(&place).await;
    let schema = place.schema().await;
    role.as_owner(&format!(
        "CREATE FUNCTION acme_mail(key TEXT, payload TEXT) RETURNS TEXT LANGUAGE sql SECURITY DEFINER
             SET search_path = pg_catalog, pg_temp
             AS $$ SELECT answer FROM {schema}.semel_enqueue('shop', 'mail', key, payload, tenant => 'acme') $$;
         REVOKE ALL ON FUNCTION acme_mail FROM PUBLIC;
         GRANT USAGE ON SCHEMA {schema} TO $role; GRANT EXECUTE ON FUNCTION acme_mail TO $role"
    ))
    .await;
    run(&mut role.conn, "SELECT acme_mail('k', 'x')").await;
    let scope = Scope::new("acme", "shop", "mail").unwrap();
    assert!(place.ledger.store().by_key(&scope, &key("k")).await.unwrap().is_some());
    let (code, _) = refused(&mut role.conn, "SELECT * FROM semel_enqueue('shop', 'mail', 'k', 'x')").await;
    assert_eq!(code, "42501");
    role.end().await;
}
