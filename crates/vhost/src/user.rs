//! Users on a command line.

/// The number of a user, from a number or a name.
pub fn user_number(text: &str) -> Result<u32, String> {
    if let Ok(uid) = text.parse() {
        return Ok(uid);
    }
    let user = nix::unistd::User::from_name(text).map_err(|e| e.to_string())?;
    user.map(|user| user.uid.as_raw()).ok_or_else(|| format!("there is no user {text}"))
}

#[cfg(test)]
mod tests {
    use super::user_number;

    #[test]
    fn user_is_named_by_number_or_name() {
        assert_eq!(user_number("1000"), Ok(1000));
        assert_eq!(user_number("root"), Ok(0));
        assert_eq!(user_number("no-such-user"), Err("there is no user no-such-user".into()));
    }
}
