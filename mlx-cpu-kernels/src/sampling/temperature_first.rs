//! The filters in the order of transformers' `generate`: temperature, top-n-sigma, top-k, top-p,
//! min-p, typical-p, XTC, draw. Each filter uses probabilities renormalized after the previous
//! filter. `sample.rs` has the default order.

use crate::isa::Isa;
use crate::sampling::sample::{DrawParams, apply_xtc, apply_xtc_to_candidates};
use crate::sampling::softmax_pass::{max_of, relative_logit};
use crate::sampling::top_k::{Workspace, candidates_above, select_top_k};
use crate::sampling::top_p::{keep_top_p, keep_top_p_of_candidates};
use crate::sampling::typical::{keep_typical, mask_atypical, mask_below_deviations};

impl DrawParams {
    /// Chooses a token of a row. `max` is the row's maximum and above minus infinity. The row is
    /// overwritten.
    pub(super) fn token_after_temperature(
        &self,
        isa: Isa,
        row: &mut [f32],
        max: f32,
        workspace: &mut Workspace,
    ) -> u32 {
        for x in row.iter_mut() {
            *x = relative_logit(*x, max) * self.scale;
        }
        // After the temperature, the maximum of the row is 0.
        let mut max = 0.0;
        if self.top_n_sigma > 0.0 {
            mask_below_deviations(row, max, self.top_n_sigma);
        }
        workspace.find_block_maxima(isa, row);
        let mut candidates = false;
        if self.top_k > 0 && self.top_k < row.len() {
            select_top_k(row, self.top_k, workspace);
            workspace.candidates.sort_unstable_by_key(|f| f.1);
            candidates = true;
        }
        if self.top_p < 1.0 {
            if candidates {
                keep_top_p_of_candidates(isa, max, self.top_p, workspace);
            } else {
                keep_top_p(isa, row, (max, f32::NEG_INFINITY), self.top_p, workspace);
            }
            candidates = true;
        }
        if self.min_p > 0.0 {
            let least = self.min_p.ln();
            if candidates {
                workspace.candidates.retain(|f| f.0 >= least);
            } else {
                let maxima = &workspace.block_maxima;
                candidates_above(row, maxima, least, &mut workspace.candidates);
            }
            candidates = true;
        }
        if self.typical_p < 1.0 {
            if candidates {
                max = keep_typical(isa, max, self.typical_p, workspace);
            } else {
                mask_atypical(isa, row, max, self.typical_p, workspace);
                workspace.find_block_maxima(isa, row);
                max = max_of(&workspace.block_maxima);
            }
        }
        if let Some((threshold, spared)) = &self.xtc {
            if candidates {
                apply_xtc_to_candidates(isa, max, *threshold, spared, workspace);
            } else {
                apply_xtc(isa, row, max, *threshold, spared, workspace);
            }
        }
        self.draw_from_rest(isa, row, (candidates, 1.0), workspace)
    }
}
