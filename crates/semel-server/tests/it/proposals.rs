//! The laws of the proposals service.
