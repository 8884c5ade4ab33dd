//! The laws of a store. A database that passes them all is one.
//!
//! Each law is a function of a fresh [`Lab`]; [`conformance_suite!`](crate::conformance_suite)
//! makes a test of each for one database.

pub mod claims;

/// Makes a test of each law for a database: `conformance_suite!(sqlite, Kind::Sqlite)`.
#[macro_export]
macro_rules! conformance_suite {
    ($name:ident, $kind:expr) => {
        mod $name {
            $crate::conformance_suite!(@laws $kind;
                claims: a_first_claim_acquires, a_second_claim_is_in_flight;
            );
        }
    };
    (@laws $kind:expr; $($module:ident: $($law:ident),+;)+) => {
        $(mod $module {
            $(#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn $law() {
                $crate::conformance::$module::$law($crate::Lab::new($kind).await).await;
            })+
        })+
    };
}
