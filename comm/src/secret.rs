//! The secret of a job, by which both ends of a connection prove that they belong to the same job. It is never sent; a
//! proof is an HMAC-SHA256 of random numbers that both sides have just drawn.

use std::fmt;
use std::fs::Metadata;
use std::io::{self, Write};
use std::path::Path;

use hmac::{Hmac, KeyInit, Mac};
use sha2::Sha256;

/// Variable that holds a job's secret.
pub const VARIABLE: &str = "VESCALE_JOB_SECRET";
/// Variable that names a file with a job's secret; used if [`VARIABLE`] is not set.
pub const FILE_VARIABLE: &str = "VESCALE_JOB_SECRET_FILE";
/// Least number of characters of a secret: a shorter one could be guessed from a recorded proof.
pub const SHORTEST: usize = 16;

/// Size of a proof in bytes.
pub(super) const PROOF: usize = 32;

/// A job's secret.
#[derive(Clone, PartialEq, Eq)]
pub struct Secret(String);

/// The end of a connection that proves; part of the proof, so that no end can replay the other's.
#[derive(Clone, Copy, Debug)]
pub(super) enum End {
    Caller,
    Listener,
}

impl Secret {
    /// Makes a secret from a given text.
    ///
    /// # Errors
    /// When it is unusable; the text says why.
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

    /// A fresh random secret.
    ///
    /// # Errors
    /// When the system provides no random numbers.
    pub fn random() -> Result<Self, String> {
        let bytes: [u8; 32] = random()?;
        Ok(Self(bytes.iter().map(|b| format!("{b:02x}")).collect()))
    }

    /// The secret given in the environment, if any; `variable` looks up a variable by name.
    ///
    /// # Errors
    /// Name of the variable, and what is wrong with it.
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

    /// The secret of ranks on one host whose launcher gave them none: a file in `folder` that only their user can
    /// read, made by whichever rank comes first and kept for later jobs.
    ///
    /// # Errors
    /// When it cannot be made, or when what exists there is not such a file.
    pub(super) fn of_this_user(folder: &Path) -> Result<Self, String> {
        let wrong = |e: io::Error| format!("{}: {e}", folder.display());
        // Made with mode 0600, and given its name only once it is complete.
        let mut draft = tempfile::NamedTempFile::new_in(folder).map_err(wrong)?;
        draft
            .write_all(Self::random()?.0.as_bytes())
            .map_err(wrong)?;
        let own = draft.as_file().metadata().map_err(wrong)?;
        let path = folder.join(file_name(&own));
        match draft.persist_noclobber(&path) {
            Err(e) if e.error.kind() != io::ErrorKind::AlreadyExists => {
                return Err(wrong(e.error));
            }
            Ok(_) | Err(_) => {}
        }
        let found = std::fs::symlink_metadata(&path).map_err(wrong)?;
        if !found.is_file() || !is_private(&found, &own) {
            let path = path.display();
            return Err(format!(
                "{path} is not a regular file that this user alone can read; remove it, and a new one is made"
            ));
        }
        let text = std::fs::read_to_string(&path).map_err(wrong)?;
        Self::new(&text).map_err(|e| format!("{}: {e}; remove it", path.display()))
    }

    /// The secret itself, for handing it to another process.
    pub(super) fn text(&self) -> &str {
        &self.0
    }
}

/// Hides the secret, so that no log contains it.
impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret(…)")
    }
}

/// The file name contains the user id, so each user of a host has a file.
#[cfg(unix)]
fn file_name(own: &Metadata) -> String {
    use std::os::unix::fs::MetadataExt;
    format!("vescale-plan-ranks-{}.secret", own.uid())
}

#[cfg(not(unix))]
fn file_name(_own: &Metadata) -> String {
    "vescale-plan-ranks.secret".to_owned()
}

/// Whether a file belongs to the same user as one made just now, and nobody else can read it.
#[cfg(unix)]
fn is_private(found: &Metadata, own: &Metadata) -> bool {
    use std::os::unix::fs::MetadataExt;
    found.uid() == own.uid() && found.mode() & 0o077 == 0
}

#[cfg(not(unix))]
fn is_private(_found: &Metadata, _own: &Metadata) -> bool {
    true
}

/// Cryptographically secure random bytes.
pub(super) fn random<const N: usize>() -> Result<[u8; N], String> {
    let mut bytes = [0; N];
    getrandom::fill(&mut bytes).map_err(|e| format!("the system has no random numbers: {e}"))?;
    Ok(bytes)
}

fn hmac(secret: &Secret, end: End, said: &[&[u8]]) -> Hmac<Sha256> {
    let mut hmac =
        Hmac::<Sha256>::new_from_slice(secret.0.as_bytes()).expect("a key of any length");
    hmac.update(match end {
        End::Caller => b"caller",
        End::Listener => b"listen",
    });
    for part in said {
        hmac.update(part);
    }
    hmac
}

/// The proof of one end over what both ends have said.
pub(super) fn proof(secret: &Secret, end: End, said: &[&[u8]]) -> [u8; PROOF] {
    hmac(secret, end, said).finalize().into_bytes().into()
}

/// Whether a proof is valid for an end; takes constant time.
pub(super) fn proves(secret: &Secret, end: End, said: &[&[u8]], proof: &[u8; PROOF]) -> bool {
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
        let made = proof(&ours, End::Caller, said);
        assert!(proves(&ours, End::Caller, said, &made));
        assert!(!proves(&theirs, End::Caller, said, &made));
        assert!(!proves(&ours, End::Listener, said, &made));
        assert!(!proves(&ours, End::Caller, &[b"hello", b"other"], &made));
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

    /// Another's file, one that others read, a link or a short one is no secret.
    #[cfg(unix)]
    #[test]
    fn ranks_of_one_user_share_a_file_that_nobody_else_reads() {
        use std::os::unix::fs::{PermissionsExt, symlink};
        let folder = tempfile::tempdir().expect("a folder");
        let secret = || Secret::of_this_user(folder.path());
        let first = secret().expect("is made");
        assert_eq!(secret(), Ok(first));
        let entries = std::fs::read_dir(folder.path()).expect("a folder");
        let files: Vec<_> = entries.map(|e| e.expect("an entry").path()).collect();
        let [path] = &files[..] else {
            panic!("{files:?}")
        };
        let mode = |mode| {
            let mode = std::fs::Permissions::from_mode(mode);
            std::fs::set_permissions(path, mode).expect("modes");
        };
        mode(0o644);
        let wrong = secret().expect_err("others can read it");
        assert!(wrong.contains("this user alone can read"), "{wrong}");
        mode(0o600);
        std::fs::write(path, "short").expect("written");
        assert!(
            secret()
                .expect_err("too short")
                .contains("has 5 characters")
        );
        std::fs::remove_file(path).expect("removed");
        symlink(folder.path().join("elsewhere"), path).expect("a link");
        assert!(secret().is_err());
        let threads = std::thread::scope(|scope| {
            std::fs::remove_file(path).expect("removed");
            let all = [(); 8].map(|()| scope.spawn(secret));
            all.map(|thread| thread.join().expect("no panic").expect("a secret"))
        });
        assert!(threads.iter().all(|secret| *secret == threads[0]));
    }
}
