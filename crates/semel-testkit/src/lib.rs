//! Semel.
