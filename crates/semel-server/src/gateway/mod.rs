//! The gateway: Idempotency-Key for any HTTP service behind it.
