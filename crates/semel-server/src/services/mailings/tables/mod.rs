//! The SQL: mailings, their entries, imports, uploaded files, transports' rates, suppressed addresses.

pub(super) mod chunks;
pub(super) mod entries;
pub(super) mod imports;
pub(super) mod mailings;
pub(super) mod rates;
pub(super) mod suppressions;

/// All statements.
#[cfg(test)]
pub(super) fn statements() -> Vec<crate::sql::Statement> {
    let lists = [
        chunks::statements,
        entries::statements,
        imports::statements,
        mailings::statements,
        rates::statements,
        suppressions::statements,
    ];
    lists.into_iter().flat_map(|list| list()).collect()
}
