//! Products of input rows with a micro-panel of a dense matrix, for AVX-512. `avx2/columns.rs`
//! generates the functions.

use std::arch::x86_64::{
    __m512, _MM_HINT_T0, _MM_HINT_T1, _mm_prefetch, _mm512_add_ps, _mm512_fmadd_ps,
    _mm512_loadu_ps, _mm512_set1_ps, _mm512_setzero_ps, _mm512_storeu_ps,
};

use crate::layout::tile::{Ahead, ColumnOutput, TileA};
use crate::simd::avx2::columns::columns_for;

columns_for!(
    "avx2,fma,avx512f", __m512, 16, 3,
    _mm512_setzero_ps, _mm512_fmadd_ps, _mm512_add_ps, _mm512_set1_ps, _mm512_loadu_ps,
    _mm512_storeu_ps,
    most: 8, 1, 2, 3, 4, 5, 6, 7, 8
);
