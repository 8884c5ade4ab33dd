//! The laws of the gateway.
