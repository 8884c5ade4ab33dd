//! Runs every example: what the documentation shows must work.

#[path = "../transfer.rs"]
mod transfer;

#[test]
fn transfer_moves_the_money_once() {
    transfer::main().unwrap();
}
