//! The order of rows in query and key projections. For llama, GGUF files order each head's rows so
//! that the rotation pairs adjacent elements. Other formats rotate the two halves of a head.

/// Restores the usual row order of `attn_q` or `attn_k`. `data` contains the stored bytes of `rows`
/// rows; `heads` is the number of query or key heads. Whole rows move, so every type works,
/// including quantized types. A bias counts as rows of one element. `rows` must be a multiple of
/// `2 * heads`, and the number of bytes a multiple of `rows`.
pub fn unpermute_rows(data: &[u8], rows: usize, heads: usize) -> Vec<u8> {
    let mut out = vec![0; data.len()];
    unpermute_into(data, rows, heads, &mut out);
    out
}

/// Like [`unpermute_rows`], into `out`, which has the length of `data`.
pub fn unpermute_into(data: &[u8], rows: usize, heads: usize, out: &mut [u8]) {
    let row_bytes = (data.len() / rows.max(1)).max(1);
    let dim = rows / heads.max(1);
    for (row, out) in out.chunks_exact_mut(row_bytes).enumerate() {
        let start = permuted_row(row, dim) * row_bytes;
        if let Some(stored) = data.get(start..start + row_bytes) {
            out.copy_from_slice(stored);
        }
    }
}

/// The stored index of a row in the usual order. A head has `dim` rows, an even number.
pub fn permuted_row(row: usize, dim: usize) -> usize {
    let (dim, half) = (dim.max(1), (dim / 2).max(1));
    // Row (head, half h, i) of the usual order is row (head, i, h) in the file.
    let (head, h, i) = (row / dim, row % dim / half, row % half);
    head * dim + 2 * i + h
}
