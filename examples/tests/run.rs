//! Runs every example: what the documentation shows must work.
#![expect(clippy::unwrap_used, reason = "these are tests")]

mod orders;
#[path = "../transfer.rs"]
mod transfer;

#[test]
fn transfer_moves_the_money_once() {
    transfer::main().unwrap();
}
