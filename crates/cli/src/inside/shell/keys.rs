//! What is typed in a session: most is sent, and a tilde at the beginning of a line is for this program.

use bytes::{Bytes, BytesMut};

/// What `~?` shows.
pub(super) const HELP: &[u8] = b"\r\n\
Keys at the beginning of a line:\r\n\
  ~.  end the shell and disconnect\r\n\
  ~?  this help\r\n\
  ~~  send one ~\r\n";

/// What is to be done about what was typed.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Pressed {
    /// Sends bytes to the shell.
    Send(Bytes),
    /// Shows the keys.
    Help,
    /// Disconnects.
    Disconnect,
}

/// Where in a line the next key is.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
enum At {
    #[default]
    Begin,
    Tilde,
    Inside,
}

/// The keys so far.
#[derive(Debug, Default)]
pub(super) struct Keys(At);

impl Keys {
    /// Takes what was typed.
    pub(super) fn press(&mut self, typed: &[u8]) -> Vec<Pressed> {
        let mut all = Vec::new();
        let mut send = BytesMut::new();
        for &byte in typed {
            let is_end = matches!(byte, b'\r' | b'\n');
            match (self.0, byte) {
                (At::Begin, b'~') => {
                    self.0 = At::Tilde;
                    continue;
                }
                (At::Tilde, b'.' | b'?') => {
                    if !send.is_empty() {
                        all.push(Pressed::Send(send.split().freeze()));
                    }
                    self.0 = At::Begin;
                    if byte == b'.' {
                        all.push(Pressed::Disconnect);
                        return all;
                    }
                    all.push(Pressed::Help);
                    continue;
                }
                (At::Tilde, b'~') => send.extend_from_slice(b"~"),
                (At::Tilde, _) => {
                    send.extend_from_slice(b"~");
                    send.extend_from_slice(&[byte]);
                }
                (At::Begin | At::Inside, _) => send.extend_from_slice(&[byte]),
            }
            self.0 = if is_end { At::Begin } else { At::Inside };
        }
        if !send.is_empty() {
            all.push(Pressed::Send(send.freeze()));
        }
        all
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sent(typed: &[&str]) -> (String, Vec<Pressed>) {
        let mut keys = Keys::default();
        let mut text = String::new();
        let mut others = Vec::new();
        for piece in typed {
            for pressed in keys.press(piece.as_bytes()) {
                match pressed {
                    Pressed::Send(bytes) => text.push_str(std::str::from_utf8(&bytes).unwrap()),
                    other => others.push(other),
                }
            }
        }
        (text, others)
    }

    #[test]
    fn a_tilde_counts_at_the_beginning_of_a_line() {
        for (typed, text, others) in [
            (&["ls ~/.\r"][..], "ls ~/.\r", vec![]),
            (&["~", "."][..], "", vec![Pressed::Disconnect]),
            (&["ls\r~."][..], "ls\r", vec![Pressed::Disconnect]),
            (&["~~.\r"][..], "~.\r", vec![]),
            (&["~a~.\r~?x"][..], "~a~.\rx", vec![Pressed::Help]),
            (&["~\r~."][..], "~\r", vec![Pressed::Disconnect]),
        ] {
            assert_eq!(sent(typed), (text.to_owned(), others), "{typed:?}");
        }
    }
}
