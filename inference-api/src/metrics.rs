//! Metrics of a request: time, tokens and memory. Backends measure them. This file defines the
//! struct and computes rates.

use std::time::Duration;

use serde::de::Error as _;
use serde::ser::SerializeStruct;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// The metrics of one request. In JSON, times are in seconds, and both rates are included.
#[non_exhaustive]
#[derive(Debug, Clone, Default, PartialEq)]
pub struct GenerateMetrics {
    /// Tokens of the prompt.
    pub prompt_tokens: usize,
    /// Tokens of the prompt that came from the cache of earlier requests.
    pub cached_tokens: usize,
    /// Generated tokens.
    pub generated_tokens: usize,
    /// Tokens proposed by a draft model or by prompt lookup.
    pub draft_tokens: usize,
    /// Proposed tokens that the model accepted.
    pub accepted_draft_tokens: usize,
    /// Time from the start of the prefill to the first token.
    pub prefill_time: Duration,
    /// Time from the first token to the last.
    pub decode_time: Duration,
    /// Time from the start to the end.
    pub total_time: Duration,
    /// Time from the call to the first token, with queueing.
    pub time_to_first_token: Duration,
    /// Peak memory of the backend during the request, with weights, in bytes. Concurrent requests
    /// share this value: it is the peak since the first overlapping request started.
    pub peak_memory_bytes: u64,
    /// Peak memory between the first token and the last, including weights, in bytes; 0 when
    /// unknown. Only a request that ran alone at its first token has this figure.
    pub decode_peak_memory_bytes: u64,
    /// Memory in use at the end, in bytes.
    pub active_memory_bytes: u64,
}

fn rate(tokens: usize, time: Duration) -> f64 {
    let seconds = time.as_secs_f64();
    if seconds > 0.0 {
        tokens as f64 / seconds
    } else {
        0.0
    }
}

impl GenerateMetrics {
    /// Prompt tokens computed per second of prefill; 0 when unknown.
    #[must_use]
    pub fn prefill_tokens_per_second(&self) -> f64 {
        rate(
            self.prompt_tokens.saturating_sub(self.cached_tokens),
            self.prefill_time,
        )
    }

    /// The fraction of proposed tokens that were accepted; 0 when none were proposed.
    #[must_use]
    pub fn draft_acceptance(&self) -> f64 {
        if self.draft_tokens == 0 {
            return 0.0;
        }
        self.accepted_draft_tokens as f64 / self.draft_tokens as f64
    }

    /// Tokens per second after the first token, which counts as prefill; 0 when unknown.
    #[must_use]
    pub fn decode_tokens_per_second(&self) -> f64 {
        rate(self.generated_tokens.saturating_sub(1), self.decode_time)
    }
}

impl Serialize for GenerateMetrics {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut s = serializer.serialize_struct("GenerateMetrics", 14)?;
        s.serialize_field("prompt_tokens", &self.prompt_tokens)?;
        s.serialize_field("cached_tokens", &self.cached_tokens)?;
        s.serialize_field("generated_tokens", &self.generated_tokens)?;
        s.serialize_field("draft_tokens", &self.draft_tokens)?;
        s.serialize_field("accepted_draft_tokens", &self.accepted_draft_tokens)?;
        s.serialize_field("prefill_time", &self.prefill_time.as_secs_f64())?;
        s.serialize_field("decode_time", &self.decode_time.as_secs_f64())?;
        s.serialize_field("total_time", &self.total_time.as_secs_f64())?;
        s.serialize_field(
            "time_to_first_token",
            &self.time_to_first_token.as_secs_f64(),
        )?;
        s.serialize_field(
            "prefill_tokens_per_second",
            &self.prefill_tokens_per_second(),
        )?;
        s.serialize_field("decode_tokens_per_second", &self.decode_tokens_per_second())?;
        s.serialize_field("peak_memory_bytes", &self.peak_memory_bytes)?;
        s.serialize_field("decode_peak_memory_bytes", &self.decode_peak_memory_bytes)?;
        s.serialize_field("active_memory_bytes", &self.active_memory_bytes)?;
        s.end()
    }
}

impl<'de> Deserialize<'de> for GenerateMetrics {
    /// Reads the output of [`Serialize`]. Missing fields are zero. Rates in the input are ignored,
    /// because they are computed.
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        #[derive(Default, Deserialize)]
        #[serde(default, deny_unknown_fields)]
        struct Figures {
            prompt_tokens: usize,
            cached_tokens: usize,
            generated_tokens: usize,
            draft_tokens: usize,
            accepted_draft_tokens: usize,
            prefill_time: f64,
            decode_time: f64,
            total_time: f64,
            time_to_first_token: f64,
            #[serde(rename = "prefill_tokens_per_second")]
            _prefill_rate: f64,
            #[serde(rename = "decode_tokens_per_second")]
            _decode_rate: f64,
            peak_memory_bytes: u64,
            decode_peak_memory_bytes: u64,
            active_memory_bytes: u64,
        }
        let f = Figures::deserialize(deserializer)?;
        let time = |name: &str, seconds: f64| {
            Duration::try_from_secs_f64(seconds)
                .map_err(|e| D::Error::custom(format!("{name} is {seconds} seconds: {e}")))
        };
        Ok(Self {
            prompt_tokens: f.prompt_tokens,
            cached_tokens: f.cached_tokens,
            generated_tokens: f.generated_tokens,
            draft_tokens: f.draft_tokens,
            accepted_draft_tokens: f.accepted_draft_tokens,
            prefill_time: time("prefill_time", f.prefill_time)?,
            decode_time: time("decode_time", f.decode_time)?,
            total_time: time("total_time", f.total_time)?,
            time_to_first_token: time("time_to_first_token", f.time_to_first_token)?,
            peak_memory_bytes: f.peak_memory_bytes,
            decode_peak_memory_bytes: f.decode_peak_memory_bytes,
            active_memory_bytes: f.active_memory_bytes,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates_are_finite_and_in_the_json() {
        let zero = GenerateMetrics::default();
        assert_eq!(
            (
                zero.prefill_tokens_per_second(),
                zero.decode_tokens_per_second()
            ),
            (0.0, 0.0)
        );
        let m = GenerateMetrics {
            prompt_tokens: 14,
            cached_tokens: 4,
            generated_tokens: 5,
            draft_tokens: 8,
            accepted_draft_tokens: 2,
            prefill_time: Duration::from_millis(500),
            decode_time: Duration::from_secs(2),
            ..zero
        };
        let json = serde_json::to_value(&m).unwrap();
        assert_eq!(json["prefill_tokens_per_second"], 20.0);
        assert_eq!(json["decode_tokens_per_second"], 2.0);
        assert_eq!(json["prefill_time"], 0.5);
        assert_eq!(m.draft_acceptance(), 0.25);
        assert_eq!(serde_json::from_value::<GenerateMetrics>(json).unwrap(), m);
        for bad in [
            r#"{"prefill_time": -1}"#,
            r#"{"decode_time": 1e300}"#,
            r#"{"prompt": 1}"#,
        ] {
            assert!(
                serde_json::from_str::<GenerateMetrics>(bad).is_err(),
                "{bad}"
            );
        }
    }

    proptest::proptest! {
        #[test]
        fn figures_survive_json(tokens: (u32, u32, u32), nanos: [u32; 4], bytes: [u64; 3]) {
            let time = |n: u32| Duration::from_nanos(u64::from(n) * 1000 + 1);
            let m = GenerateMetrics {
                prompt_tokens: tokens.0 as usize,
                cached_tokens: tokens.2 as usize,
                generated_tokens: tokens.1 as usize,
                draft_tokens: tokens.2 as usize,
                accepted_draft_tokens: tokens.1 as usize,
                prefill_time: time(nanos[0]),
                decode_time: time(nanos[1]),
                total_time: time(nanos[2]),
                time_to_first_token: time(nanos[3]),
                peak_memory_bytes: bytes[0],
                decode_peak_memory_bytes: bytes[1],
                active_memory_bytes: bytes[2],
            };
            let json = serde_json::to_string(&m).unwrap();
            proptest::prop_assert_eq!(serde_json::from_str::<GenerateMetrics>(&json).unwrap(), m);
        }
    }
}
