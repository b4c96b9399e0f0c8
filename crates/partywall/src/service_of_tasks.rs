//! The part of `service!` for tokio.

/// The part of [`service!`](crate::service) for tokio.
#[cfg(feature = "tokio")]
#[doc(hidden)]
#[macro_export]
macro_rules! service_of_tasks {
    (
        ($(#[$meta:meta])*) $vis:vis $service:ident ($($tasks:ident)?) $client:ident
        $(fn $method:ident($($arg:ident: $type:ty),*) -> ($result:ty), ($(#[$method_meta:meta])*);)*
    ) => {
        #[allow(dead_code, reason = "a program uses a part of a client")]
        impl $client<$crate::asynchronous::AsyncCallClient> {
            $(
                $(#[$method_meta])*
                $vis async fn $method(
                    &self,
                    $($arg: $type),*
                ) -> ::std::result::Result<<$result as $crate::rpc::MethodResult>::Received, $crate::rpc::CallError> {
                    const METHOD: $crate::rpc::Method =
                        $crate::rpc::Method::named(concat!(stringify!($service), ".", stringify!($method)));
                    #[allow(unused_mut, reason = "a method without arguments passes none")]
                    let mut frame = $crate::rpc::ValueWriter::default();
                    $($crate::rpc::Argument::pass(&$arg, &mut frame);)*
                    let reply = match self.longest {
                        ::std::option::Option::Some(longest) => {
                            self.calls.call_within(longest, METHOD, frame.bytes()).await?
                        }
                        ::std::option::Option::None => self.calls.call(METHOD, frame.bytes()).await?,
                    };
                    <$result as $crate::rpc::MethodResult>::receive(reply)
                }
            )*
        }

        $crate::service_of_tasks! {
            @tasks ($($tasks)?) ($(#[$meta])*) $vis $service
            $(fn $method($($arg: $type),*) -> ($result), ($(#[$method_meta])*);)*
        }
    };
    (@tasks () $($rest:tt)*) => {};
    (
        @tasks ($tasks:ident) ($(#[$meta:meta])*) $vis:vis $service:ident
        $(fn $method:ident($($arg:ident: $type:ty),*) -> ($result:ty), ($(#[$method_meta:meta])*);)*
    ) => {
        $(#[$meta])*
        $vis trait $tasks: Send + Sync + 'static {
            $(
                $(#[$method_meta])*
                fn $method(
                    &self,
                    call: $crate::rpc::IncomingCall<'static>,
                    $($arg: <fn($type) as $crate::rpc::Declared>::Seen,)*
                ) -> impl ::std::future::Future<Output = ::std::result::Result<$result, $crate::rpc::CallError>> + Send;
            )*

            /// Adds the methods of this service to a server.
            fn add_to(self, builder: $crate::asynchronous::AsyncCallServerBuilder)
                -> $crate::asynchronous::AsyncCallServerBuilder
            where
                Self: Sized,
            {
                let service = ::std::sync::Arc::new(self);
                $(
                    let this = ::std::sync::Arc::clone(&service);
                    let builder = builder.method(
                        concat!(stringify!($service), ".", stringify!($method)),
                        move |call| {
                            let this = ::std::sync::Arc::clone(&this);
                            async move {
                                #[allow(unused_mut, reason = "a method without arguments reads none")]
                                let mut frame = $crate::rpc::ValueReader::of_call(&call);
                                $(let $arg = <fn($type) as $crate::rpc::Declared>::see(&mut frame)?;)*
                                frame.finish()?;
                                Self::$method(&this, call, $($arg),*).await.map($crate::rpc::MethodResult::give)
                            }
                        },
                    );
                )*
                builder
            }
        }
    };
}

/// Without tokio there is no such part.
#[cfg(not(feature = "tokio"))]
#[doc(hidden)]
#[macro_export]
macro_rules! service_of_tasks {
    ($($any:tt)*) => {};
}
