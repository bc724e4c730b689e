//! The secret of a job: what proves to a rank that the process at the other end of a connection belongs to the
//! same job. It is never sent; a proof is an HMAC-SHA256 of numbers that both sides have just drawn.

use std::fmt;

use hmac::{Hmac, KeyInit, Mac};
use sha2::Sha256;

/// Variable that holds a job's secret.
pub const VARIABLE: &str = "VESCALE_JOB_SECRET";
/// Variable that names a file with a job's secret; looked at where [`VARIABLE`] is not set.
pub const FILE_VARIABLE: &str = "VESCALE_JOB_SECRET_FILE";
/// Characters of a secret, at least: a shorter one could be guessed from a recorded proof.
pub const SHORTEST: usize = 16;
/// Key of jobs without a secret. Proofs by it show nothing but the protocol: such ranks talk on loopback only.
const NO_SECRET: &[u8] = b"vescale-plan: ranks of one host, without a secret";

/// Bytes of a proof.
pub(super) const PROOF: usize = 32;

/// A job's secret.
#[derive(Clone, PartialEq, Eq)]
pub struct Secret(String);

/// Who proves: the same numbers make another proof at each end.
#[derive(Clone, Copy, Debug)]
pub(super) enum End {
    Caller,
    Listener,
}

impl Secret {
    /// A secret that somebody chose.
    ///
    /// # Errors
    /// What is wrong with it.
    pub fn new(text: &str) -> Result<Self, String> {
        let text = text.trim();
        if text.len() < SHORTEST {
            return Err(format!(
                "has {} characters; a secret has at least {SHORTEST}, such as `openssl rand -hex 32` prints",
                text.len()
            ));
        }
        Ok(Self(text.to_owned()))
    }

    /// A secret that nobody knows yet.
    ///
    /// # Errors
    /// When the system has no random numbers.
    pub fn random() -> Result<Self, String> {
        let bytes: [u8; 32] = random()?;
        Ok(Self(bytes.iter().map(|b| format!("{b:02x}")).collect()))
    }

    /// The secret that the environment tells; `variable` looks a name up.
    ///
    /// # Errors
    /// The variable and what is wrong with it.
    pub(super) fn told(
        variable: impl Fn(&str) -> Option<String>,
    ) -> Result<Option<Self>, (&'static str, String)> {
        if let Some(text) = variable(VARIABLE) {
            return Self::new(&text).map(Some).map_err(|e| (VARIABLE, e));
        }
        let Some(path) = variable(FILE_VARIABLE) else {
            return Ok(None);
        };
        std::fs::read_to_string(&path)
            .map_err(|e| e.to_string())
            .and_then(|text| Self::new(&text))
            .map(Some)
            .map_err(|e| (FILE_VARIABLE, format!("{path}: {e}")))
    }

    /// The secret itself, to hand it to another process.
    pub(super) fn text(&self) -> &str {
        &self.0
    }
}

/// Nobody reads a secret from a log.
impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret(…)")
    }
}

/// Bytes that nobody can foresee.
pub(super) fn random<const N: usize>() -> Result<[u8; N], String> {
    let mut bytes = [0; N];
    getrandom::fill(&mut bytes).map_err(|e| format!("the system has no random numbers: {e}"))?;
    Ok(bytes)
}

fn hmac(secret: Option<&Secret>, end: End, said: &[&[u8]]) -> Hmac<Sha256> {
    let key = secret.map_or(NO_SECRET, |secret| secret.0.as_bytes());
    let mut hmac = Hmac::<Sha256>::new_from_slice(key).expect("a key of any length");
    hmac.update(match end {
        End::Caller => b"caller",
        End::Listener => b"listen",
    });
    for part in said {
        hmac.update(part);
    }
    hmac
}

/// Proof of one end, over what both have said.
pub(super) fn proof(secret: Option<&Secret>, end: End, said: &[&[u8]]) -> [u8; PROOF] {
    hmac(secret, end, said).finalize().into_bytes().into()
}

/// Whether a proof is that of an end; takes equally long whatever differs.
pub(super) fn proves(
    secret: Option<&Secret>,
    end: End,
    said: &[&[u8]],
    proof: &[u8; PROOF],
) -> bool {
    hmac(secret, end, said).verify_slice(proof).is_ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_proof_is_of_one_secret_one_end_and_what_was_said() {
        let secret = |text| Secret::new(text).expect("long enough");
        let (ours, theirs) = (secret("0123456789abcdef"), secret("0123456789abcdeg"));
        let said: &[&[u8]] = &[b"hello", b"nonce"];
        let made = proof(Some(&ours), End::Caller, said);
        assert!(proves(Some(&ours), End::Caller, said, &made));
        assert!(!proves(Some(&theirs), End::Caller, said, &made));
        assert!(!proves(None, End::Caller, said, &made));
        assert!(!proves(Some(&ours), End::Listener, said, &made));
        assert!(!proves(
            Some(&ours),
            End::Caller,
            &[b"hello", b"other"],
            &made
        ));
    }

    #[test]
    fn a_secret_is_told_by_variable_or_file_and_shown_nowhere() {
        let told = |name: &'static str, value: &str| {
            Secret::told(|asked| (asked == name).then(|| value.to_owned()))
        };
        assert_eq!(told("OTHER", ""), Ok(None));
        let secret = told(VARIABLE, " 0123456789abcdef\n").expect("long enough");
        let secret = secret.expect("was told");
        assert_eq!(secret.text(), "0123456789abcdef");
        assert_eq!(format!("{secret:?}"), "Secret(…)");
        let (name, wrong) = told(VARIABLE, "short").expect_err("too short");
        assert!(name == VARIABLE && wrong.contains("has 5 characters"));
        let path = std::env::temp_dir().join(format!("vescale-secret-{}", std::process::id()));
        let shown = path.to_str().expect("UTF-8").to_owned();
        let (name, wrong) = told(FILE_VARIABLE, &shown).expect_err("no such file");
        assert!(name == FILE_VARIABLE && wrong.contains(&shown));
        std::fs::write(&path, "fedcba9876543210\n").expect("writable");
        let read = told(FILE_VARIABLE, &shown).expect("long enough");
        std::fs::remove_file(&path).expect("is there");
        assert_eq!(read.expect("was told").text(), "fedcba9876543210");
        assert_ne!(
            Secret::random().expect("random"),
            Secret::random().expect("random")
        );
    }
}
