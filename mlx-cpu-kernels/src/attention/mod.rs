//! Attention over KV caches, rotary embedding, and writes into caches.

pub(crate) mod attend;
pub(crate) mod decode_attention;
pub(crate) mod decode_schedule;
pub(crate) mod flash_attention;
pub(crate) mod key_blocks;
pub(crate) mod kv_copy;
pub(crate) mod kv_packing;
pub(crate) mod kv_type;
pub(crate) mod kv_write;
#[cfg(test)]
mod order_tests;
pub(crate) mod prefetch;
pub(crate) mod rope;
pub(crate) mod run;
