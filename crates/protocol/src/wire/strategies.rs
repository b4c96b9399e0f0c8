//! The proptest strategies for each type of field. Those of messages and rows are composed from these by their tables.

use alloc::string::String;

use proptest::prelude::*;
use proptest::sample::select;

use super::*;

/// A type that proptest can make values of.
pub(super) trait Any: Sized + core::fmt::Debug {
    /// Values of it, none of which encoding cuts.
    fn any() -> BoxedStrategy<Self>;
}

macro_rules! any {
    ($($t:ty: $strategy:expr;)*) => {$(
        impl Any for $t {
            fn any() -> BoxedStrategy<Self> {
                $strategy.boxed()
            }
        }
    )*};
}

any! {
    u8: any::<u8>();
    u16: any::<u16>();
    u32: any::<u32>();
    u64: any::<u64>();
    bool: any::<bool>();
    String: prop_oneof![
        "[A-Za-z0-9][A-Za-z0-9._-]{0,63}",
        proptest::collection::vec(any::<char>().prop_filter("no NUL", |c| *c != '\0'), 0..40)
            .prop_map(String::from_iter)
    ];
    Text: String::any().prop_map(Text);
    AddressList: {
        let four = any::<u32>().prop_map(|bits| core::net::Ipv4Addr::from_bits(bits).into());
        // The encoding writes IPv4-mapped addresses as IPv4, so these are always proper IPv6.
        let six = any::<u128>().prop_map(|bits| core::net::Ipv6Addr::from_bits(bits | 1 << 127).into());
        proptest::collection::vec(prop_oneof![four, six], 0..=AddressList::MAX).prop_map(AddressList)
    };
    User: prop_oneof![any::<u32>().prop_map(User::Host), any::<MachineId>().prop_map(User::Machine)];
    Kind: select(Kind::ALL);
    Side: select(Side::ALL);
    What: select(What::ALL);
    PolicyQuestion: select(PolicyQuestion::ALL);
    EventKind: select(EventKind::ALL);
    NameNews: select(NameNews::ALL);
    PluggedAs: select(PluggedAs::ALL);
    RungBy: select(RungBy::ALL);
    BellWay: select(BellWay::ALL);
    Mobility: select(Mobility::ALL);
    Refusal: select(Refusal::ALL);
    RegionReference: (select(Within::ALL), any::<(u64, u64, u64)>()).prop_map(
        |(within, (base, ring_offset, ring_size))| RegionReference { within, base, ring_offset, ring_size }
    );
    Directions: select(&[Directions::FORWARD, Directions::REVERSE, Directions::BOTH][..]);
}

impl<T: Any + Clone + 'static> Any for Page<T> {
    fn any() -> BoxedStrategy<Self> {
        (any::<bool>(), proptest::collection::vec(T::any(), 0..4)).prop_map(|(more, rows)| Self { more, rows }).boxed()
    }
}

/// Any message of any kind.
pub(super) fn message() -> impl Strategy<Value = Message> {
    proptest::strategy::Union::new(message::any_of_each())
}
