//! The edit of a webhook body, as cuts in its text.
//!
//! Parsing into a tree and printing it again would be shorter, and would rewrite what it was not
//! asked to touch: `1.0`, `1e400`, escapes, doubled keys, spaces. Here one pass finds where the
//! unwanted members of `data` begin and end and copies everything around them. It holds no stack
//! frame per level, so deep nesting costs nothing, and it allocates little more than the answer.
//!
//! The platform hands over valid JSON; text that is not ends in [`Malformed`], never in a panic.

use std::fmt;

/// The most a plugin may answer, in bytes.
const LIMIT: usize = 65_536;

/// The member of `data` that is added: the event type and, where there is one, the object's id.
const SUMMARY: &str = "summary";

pub struct Edited {
    pub text: String,
    /// How many members were taken out.
    pub removed: u32,
}

/// The byte at which the text stopped being JSON.
#[derive(Debug, PartialEq)]
pub struct Malformed(usize);

impl fmt::Display for Malformed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "the event's body is not JSON at byte {}", self.0)
    }
}

/// Removes the members named in `unwanted` from `data` at any depth, then adds `data.summary`. The
/// summary is made of what is left, is never put over a member of that name, and is left out
/// where it would make the body too long.
pub fn edit(body: &str, event_type: &str, unwanted: &[String]) -> Result<Edited, Malformed> {
    let mut editor = Editor::new(body, unwanted);
    editor.expect(b'{')?;
    let mut first = true;
    while let Some(key) = editor.member(&mut first)? {
        if is(key, "data") {
            editor.data(event_type)?;
        } else {
            editor.skip()?;
        }
    }
    Ok(editor.finish())
}

/// What is open around the value at hand.
enum Open {
    Array,
    /// `first`: no member of it was kept yet, so the next needs no comma before it.
    Object {
        first: bool,
    },
}

struct Editor<'a> {
    text: &'a str,
    at: usize,
    /// Everything before it is in `out` or was cut.
    copied: usize,
    out: String,
    removed: u32,
    unwanted: &'a [String],
}

impl<'a> Editor<'a> {
    fn new(text: &'a str, unwanted: &'a [String]) -> Self {
        let out = String::with_capacity(text.len() + 128);
        Self {
            text,
            at: 0,
            copied: 0,
            out,
            removed: 0,
            unwanted,
        }
    }

    fn finish(mut self) -> Edited {
        self.out.push_str(&self.text[self.copied..]);
        Edited {
            text: self.out,
            removed: self.removed,
        }
    }

    /// The value of `data`, with the summary added if it is an object.
    fn data(&mut self, event_type: &str) -> Result<(), Malformed> {
        if self.peek()? != b'{' {
            return self.clean();
        }
        self.at += 1;
        let (mut first, mut id, mut taken) = (true, "", false);
        while let Some(key) = self.kept_member(&mut first)? {
            self.peek()?;
            let from = self.at;
            self.clean()?;
            if is(key, "id") {
                id = &self.text[from..self.at];
            }
            taken |= is(key, SUMMARY);
        }
        if !taken {
            self.summarise(event_type, id, first);
        }
        Ok(())
    }

    /// Writes the summary before the `}` that was just read.
    fn summarise(&mut self, event_type: &str, id: &str, first: bool) {
        let comma = if first { "" } else { "," };
        // Types are dotted names, which need no escapes, and an id is copied with those it has.
        let id = id
            .strip_prefix('"')
            .and_then(|id| id.strip_suffix('"'))
            .unwrap_or_default();
        let space = if id.is_empty() { "" } else { " " };
        let member = format!(r#"{comma}"{SUMMARY}":"{event_type}{space}{id}""#);

        let end = self.at - 1;
        let length = self.out.len() + (self.text.len() - self.copied) + member.len();
        if length <= LIMIT {
            self.out.push_str(&self.text[self.copied..end]);
            self.out.push_str(&member);
            self.copied = end;
        }
    }

    /// Passes a value, cutting unwanted members out of every object in it.
    fn clean(&mut self) -> Result<(), Malformed> {
        let mut open = Vec::new();
        loop {
            match self.peek()? {
                b'{' => {
                    self.at += 1;
                    open.push(Open::Object { first: true });
                }
                b'[' => {
                    self.at += 1;
                    if self.peek()? != b']' {
                        open.push(Open::Array);
                        continue;
                    }
                    self.at += 1;
                }
                _ => self.scalar()?,
            }
            // On to the next value, out of all that ends here.
            loop {
                let inside = match open.last_mut() {
                    None => return Ok(()),
                    Some(Open::Object { first }) => self.kept_member(first)?.is_some(),
                    Some(Open::Array) if self.peek()? == b']' => {
                        self.at += 1;
                        false
                    }
                    Some(Open::Array) => {
                        self.expect(b',')?;
                        true
                    }
                };
                if inside {
                    break;
                }
                open.pop();
            }
        }
    }

    /// As [`Self::member`], cutting the unwanted ones on the way.
    fn kept_member(&mut self, first: &mut bool) -> Result<Option<&'a str>, Malformed> {
        loop {
            // A cut takes one comma along: the one before, or for the first member the one after.
            let (from, was_first) = (self.at, *first);
            let Some(key) = self.member(first)? else {
                return Ok(None);
            };
            if !self.unwanted.iter().any(|name| is(key, name)) {
                return Ok(Some(key));
            }
            self.skip()?;
            *first = was_first;
            if was_first && self.peek()? == b',' {
                self.at += 1;
                // No member follows the comma: it stood before a `}`.
                if self.peek()? != b'"' {
                    return Err(Malformed(self.at));
                }
            }
            self.out.push_str(&self.text[self.copied..from]);
            self.copied = self.at;
            self.removed += 1;
        }
    }

    /// In an object, after its `{` or a member: the raw key of the next member, leaving its value
    /// ahead; `None` past the `}`.
    fn member(&mut self, first: &mut bool) -> Result<Option<&'a str>, Malformed> {
        if self.peek()? == b'}' {
            self.at += 1;
            return Ok(None);
        }
        if !*first {
            self.expect(b',')?;
        }
        *first = false;
        self.peek()?;
        let from = self.at;
        self.string()?;
        let key = &self.text[from + 1..self.at - 1];
        self.expect(b':')?;
        Ok(Some(key))
    }

    /// Passes a value as it is.
    fn skip(&mut self) -> Result<(), Malformed> {
        let mut depth = 0_usize;
        loop {
            match self.peek()? {
                b'{' | b'[' => {
                    self.at += 1;
                    depth += 1;
                }
                b'}' | b']' => {
                    depth = depth.checked_sub(1).ok_or(Malformed(self.at))?;
                    self.at += 1;
                }
                b',' | b':' if depth > 0 => self.at += 1,
                _ => self.scalar()?,
            }
            if depth == 0 {
                return Ok(());
            }
        }
    }

    /// Passes a string, a number or a word.
    fn scalar(&mut self) -> Result<(), Malformed> {
        if self.peek()? == b'"' {
            return self.string();
        }
        let rest = &self.text.as_bytes()[self.at..];
        let length = rest
            .iter()
            .take_while(|byte| byte.is_ascii_alphanumeric() || matches!(byte, b'+' | b'-' | b'.'))
            .count();
        if length == 0 {
            return Err(Malformed(self.at));
        }
        self.at += length;
        Ok(())
    }

    fn string(&mut self) -> Result<(), Malformed> {
        self.expect(b'"')?;
        let bytes = self.text.as_bytes();
        loop {
            match bytes.get(self.at) {
                Some(b'"') => {
                    self.at += 1;
                    return Ok(());
                }
                Some(b'\\') => self.at += 2,
                Some(_) => self.at += 1,
                None => return Err(Malformed(bytes.len())),
            }
        }
    }

    fn expect(&mut self, byte: u8) -> Result<(), Malformed> {
        if self.peek()? != byte {
            return Err(Malformed(self.at));
        }
        self.at += 1;
        Ok(())
    }

    /// The next byte that is no space, which is where it goes.
    fn peek(&mut self) -> Result<u8, Malformed> {
        let bytes = self.text.as_bytes();
        while let Some(&byte) = bytes.get(self.at) {
            if !matches!(byte, b' ' | b'\n' | b'\r' | b'\t') {
                return Ok(byte);
            }
            self.at += 1;
        }
        Err(Malformed(self.at))
    }
}

/// Whether the raw text of a key spells `name`, whatever its escapes and ASCII case.
fn is(key: &str, name: &str) -> bool {
    if !key.contains('\\') {
        return key.eq_ignore_ascii_case(name);
    }
    serde_json::from_str::<String>(&format!("\"{key}\""))
        .is_ok_and(|key| key.eq_ignore_ascii_case(name))
}

#[cfg(test)]
mod tests {
    use serde_json::{Map, Value, json};

    use super::{LIMIT, Malformed, edit};

    fn names(names: &[&str]) -> Vec<String> {
        names.iter().map(ToString::to_string).collect()
    }

    fn edited(body: &str) -> String {
        edit(body, "a.b", &names(&["phone", "email", "name"]))
            .unwrap()
            .text
    }

    #[test]
    fn personal_members_go_at_any_depth_and_the_envelope_stays() {
        assert_eq!(
            edited(
                r#"{"id":"evt_1","type":"a.b","name":"kept","data":{"id":"con_1","phone":"1","x":[{"email":"e","y":1},{"Name":{"n":[1]}}]}}"#
            ),
            r#"{"id":"evt_1","type":"a.b","name":"kept","data":{"id":"con_1","x":[{"y":1},{}],"summary":"a.b con_1"}}"#
        );
    }

    #[test]
    fn what_is_kept_keeps_its_bytes() {
        let kept = r#"{ "data" : { "z":1.0,"a" : 1e400 ,"u":"\u00e9\ud800\/","a":-0, "d":[ [ ] , { } ] } , "t":0 }"#;
        let with_summary = kept.replace("{ } ] }", r#"{ } ] ,"summary":"a.b"}"#);
        assert_eq!(edited(kept), with_summary);
    }

    #[test]
    fn commas_follow_whichever_members_remain() {
        for (data, left) in [
            (r#"{"phone":1}"#, "{"),
            (r#"{"phone":1,"email":2}"#, "{"),
            (r#"{"phone":1,"email":2,"a":3}"#, r#"{"a":3,"#),
            (r#"{"a":3,"phone":1,"email":2}"#, r#"{"a":3,"#),
            (r#"{"phone":1,"a":3,"email":2}"#, r#"{"a":3,"#),
            (r#"{"a":3,"phone":1,"b":4}"#, r#"{"a":3,"b":4,"#),
        ] {
            let expected = format!(r#"{{"data":{left}"summary":"a.b"}}}}"#);
            assert_eq!(edited(&format!(r#"{{"data":{data}}}"#)), expected, "{data}");
        }
    }

    #[test]
    fn an_escaped_key_does_not_hide_a_field() {
        assert_eq!(edited(r#"{"data":[{"\u0070hone":1}]}"#), r#"{"data":[{}]}"#);
    }

    #[test]
    fn data_that_is_no_object_gets_no_summary() {
        for data in ["null", "[]", "\"phone\"", "12"] {
            let body = format!(r#"{{"data":{data}}}"#);
            assert_eq!(edited(&body), body);
        }
    }

    #[test]
    fn a_published_summary_is_not_overwritten() {
        let body = r#"{"data":{"summary":"mine"}}"#;
        assert_eq!(edited(body), body);
    }

    #[test]
    fn the_summary_holds_nothing_that_was_dropped() {
        let answer = edit(r#"{"data":{"id":"secret"}}"#, "a.b", &names(&["id"])).unwrap();
        assert_eq!(answer.text, r#"{"data":{"summary":"a.b"}}"#);
        assert_eq!(answer.removed, 1);
    }

    #[test]
    fn a_summary_never_makes_a_body_too_long() {
        let body = |length: usize| {
            let frame = r#"{"data":{"x":""}}"#;
            format!(
                r#"{{"data":{{"x":"{}"}}}}"#,
                "x".repeat(length - frame.len())
            )
        };
        let summary = r#","summary":"a.b""#.len();
        assert_eq!(edited(&body(LIMIT - summary)).len(), LIMIT);
        assert_eq!(
            edited(&body(LIMIT - summary + 1)),
            body(LIMIT - summary + 1)
        );
    }

    #[test]
    fn nesting_is_no_limit() {
        let deep = format!(r#"{{"data":{}{}}}"#, "[".repeat(30_000), "]".repeat(30_000));
        assert_eq!(edited(&deep), deep);
    }

    #[test]
    fn broken_json_is_an_error_at_its_byte_and_never_a_panic() {
        let whole = r#"{"id":"é\"","data":{"phone":[1,{"a":"\\"}],"b":[true,-1.5e3,{"name":{}}]}}"#;
        assert_eq!(edit("", "a.b", &[]).err(), Some(Malformed(0)));
        for (end, _) in whole.char_indices() {
            assert!(
                edit(&whole[..end], "a.b", &names(&["phone", "name"])).is_err(),
                "{end}"
            );
        }
        let mut broken = whole.as_bytes().to_vec();
        for at in 0..broken.len() {
            for byte in *b"\"\\{}[],: 0" {
                let kept = std::mem::replace(&mut broken[at], byte);
                if let Ok(text) = std::str::from_utf8(&broken) {
                    let _ = edit(text, "a.b", &names(&["phone", "name"]));
                }
                broken[at] = kept;
            }
        }
    }

    /// Against the obvious way, on documents made from a fixed sequence.
    #[test]
    fn the_edit_equals_removal_from_a_parsed_tree() {
        let mut random = Random(7);
        for _ in 0..2_000 {
            let body = json!({ "id": "evt_1", "data": random.value(0) });
            let mut tree = body.clone();
            remove(&mut tree["data"]);
            if let Value::Object(data) = &mut tree["data"] {
                data.entry("summary").or_insert_with(|| "a.b".into());
            }
            for text in [body.to_string(), format!("{body:#}")] {
                let answer = edited(&text);
                assert_eq!(
                    serde_json::from_str::<Value>(&answer).unwrap(),
                    tree,
                    "{text}"
                );
            }
            assert_eq!(edited(&body.to_string()), tree.to_string());
        }
    }

    fn remove(value: &mut Value) {
        match value {
            Value::Object(members) => {
                members.retain(|key, _| !matches!(&**key, "phone" | "email" | "name"));
                members.values_mut().for_each(remove);
            }
            Value::Array(items) => items.iter_mut().for_each(remove),
            _ => {}
        }
    }

    struct Random(u64);

    impl Random {
        fn below(&mut self, end: usize) -> usize {
            self.0 ^= self.0 << 13;
            self.0 ^= self.0 >> 7;
            self.0 ^= self.0 << 17;
            usize::try_from(self.0 >> 33).unwrap() % end
        }

        fn value(&mut self, depth: usize) -> Value {
            match self.below(if depth > 3 { 4 } else { 6 }) {
                0 => Value::Null,
                1 => json!(self.below(1000)),
                2 => json!(["", "\"", "\\", "{[,:]}", "é"][self.below(5)]),
                3 => json!(self.below(2) == 0),
                4 => (0..self.below(4)).map(|_| self.value(depth + 1)).collect(),
                _ => {
                    let keys = ["phone", "email", "name", "a", "b", "é\"", "summary", ""];
                    let members: Map<String, Value> = (0..self.below(6))
                        .map(|_| (keys[self.below(keys.len())].into(), self.value(depth + 1)))
                        .collect();
                    Value::Object(members)
                }
            }
        }
    }
}
