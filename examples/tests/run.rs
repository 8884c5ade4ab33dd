//! Runs every example: what the documentation shows must work.
#![expect(clippy::unwrap_used, reason = "these are tests")]

#[path = "../later.rs"]
mod later;
mod orders;
#[path = "../transfer.rs"]
mod transfer;

#[test]
fn transfer_moves_the_money_once() {
    transfer::main().unwrap();
}

#[test]
fn an_order_is_confirmed_by_a_worker() {
    later::main().unwrap();
}
