//! The stores, tested on real databases.

mod brokers;
mod by_sql;
mod contention;
mod epochs;
mod few_connections;
mod histories;
mod locked_followers;
mod locked_leases;
mod migrating;
mod opening;
mod removals;
mod sqlite_clock;
mod sqlite_held;
mod sqlite_log;
mod submissions;

semel_testkit::conformance_suite!(sqlite, semel_testkit::Kind::Sqlite);
semel_testkit::conformance_suite!(postgres, semel_testkit::Kind::Postgres);
