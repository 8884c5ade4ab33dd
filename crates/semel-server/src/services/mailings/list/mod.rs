//! The reading of mailing lists: from the bytes of a client's file to addresses, without any I/O.
//!
//! [`shape`] looks at the beginning of a file: its delimiter, its header and the column of the addresses. [`rows`]
//! reads the rows in chunks of any size and can resume after any row. [`address`] gives an address its normal form, by
//! which duplicates are found: [`seen`] is a hint for them, [`canon`] the hash of a whole list. [`doubt`]
//! notices addresses that are perhaps not meant so. [`cells`] writes the exports.

pub(crate) mod address;
pub(crate) mod broken;
pub(crate) mod canon;
pub(crate) mod cells;
pub(crate) mod doubt;
pub(crate) mod filename;
mod header;
mod kind;
mod records;
pub(crate) mod rows;
pub(crate) mod seen;
pub(crate) mod shape;
mod text;

#[cfg(test)]
mod tests;
