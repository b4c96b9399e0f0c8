//! The names of types that macros make.
//!
//! A macro of ours that makes a type takes the type's name as its first argument after the attributes, as in
//! `numbered! { /// A state. State: u8 { .. } }`. A type that is written out inside a macro's arguments is found by its keyword.

use std::collections::BTreeSet;

use proc_macro2::{Delimiter, TokenStream, TokenTree};
use syn::{Item, ItemMacro};

const KEYWORDS: [&str; 4] = ["struct", "enum", "union", "trait"];

/// The name of a macro that makes types, if the item is one.
pub(super) fn maker(item: &Item) -> Option<String> {
    let Item::Macro(ItemMacro { ident: Some(name), mac, .. }) = item else { return None };
    let mut makes = false;
    for_each_run(mac.tokens.clone(), &mut |run| {
        makes |= run.windows(2).any(|pair| is_keyword(&pair[0]) && is_punct(&pair[1], '$'));
    });
    makes.then(|| name.to_string())
}

/// The types that a use of a macro makes. The body of a macro may use `makers` as well.
pub(super) fn types(item: &ItemMacro, makers: &BTreeSet<String>) -> Vec<String> {
    let mut found = Vec::new();
    let is_definition = item.ident.is_some();
    if !is_definition && item.mac.path.segments.last().is_some_and(|last| makers.contains(&last.ident.to_string())) {
        found.extend(first_name(item.mac.tokens.clone()));
    }
    for_each_run(item.mac.tokens.clone(), &mut |run| {
        for three in run.windows(3) {
            if let [TokenTree::Ident(name), bang, TokenTree::Group(arguments)] = three
                && is_punct(bang, '!')
                && makers.contains(&name.to_string())
            {
                found.extend(first_name(arguments.stream()));
            }
        }
        for pair in run.windows(2) {
            if let [keyword, TokenTree::Ident(name)] = pair
                && is_keyword(keyword)
            {
                found.push(name.to_string());
            }
        }
    });
    found
}

/// The first word after the attributes.
fn first_name(arguments: TokenStream) -> Option<String> {
    let mut tokens = arguments.into_iter().peekable();
    while tokens.peek().is_some_and(|token| is_punct(token, '#')) {
        tokens.next();
        tokens.next_if(|token| matches!(token, TokenTree::Group(group) if group.delimiter() == Delimiter::Bracket));
    }
    match tokens.next()? {
        TokenTree::Ident(name) => Some(name.to_string()),
        _ => None,
    }
}

/// Visits the tokens, and those of each group in them.
fn for_each_run(tokens: TokenStream, visit: &mut impl FnMut(&[TokenTree])) {
    let run: Vec<TokenTree> = tokens.into_iter().collect();
    visit(&run);
    for token in run {
        if let TokenTree::Group(group) = token {
            for_each_run(group.stream(), visit);
        }
    }
}

fn is_keyword(token: &TokenTree) -> bool {
    matches!(token, TokenTree::Ident(word) if KEYWORDS.contains(&word.to_string().as_str()))
}

fn is_punct(token: &TokenTree, wanted: char) -> bool {
    matches!(token, TokenTree::Punct(punct) if punct.as_char() == wanted)
}
