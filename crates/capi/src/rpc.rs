//! Calls: `include/partywall_rpc.h`.
#![expect(unsafe_code, reason = "takes pointers from C, gives handles to it, and calls functions of it")]

use crate::argument::{self, Patience};
use crate::domain::DomainHandle;
use crate::failure::{CallFailure, ErrorCode, WaitFor};
use crate::options::{self, RawOptions};
use partywall::rpc::{Block, CallAnswer, CallClient, CallError, CallServer, IncomingCall, Method, PeerView};
use std::collections::HashMap;
use std::ffi::{c_char, c_int, c_void};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

/// The value of `PW_RPC_FAILED(0)` in the header.
const FAILED: isize = -1000;
const TRUSTING: u64 = 1;
/// The most bytes that one call's copies of the client's memory may take.
const MOST_COPIED: usize = 1 << 28;

/// `pw_rpc_client` of the header.
#[derive(Debug)]
pub struct RpcClientHandle {
    client: CallClient,
    /// Memory that C has allocated, by address.
    memory: Mutex<HashMap<usize, Block>>,
}

/// `pw_rpc_server` of the header.
#[derive(Debug)]
pub struct RpcServerHandle {
    server: CallServer,
}

/// `pw_rpc_request` of the header: a call, while its function runs.
#[derive(Debug)]
pub struct RpcRequestHandle<'a> {
    call: &'a IncomingCall<'a>,
    is_trusting: bool,
    result: Option<Block>,
    /// Copies that the function has pointers to.
    copies: Vec<Box<[u8]>>,
    copied: usize,
    /// Memory of the client's that a trusting function has pointers to.
    views: Vec<PeerView>,
}

/// `pw_rpc_function` of the header. Called on any thread of the library, with pointers that live until it returns.
type RpcFunction = unsafe extern "C" fn(*mut RpcRequestHandle<'_>, *const c_void, usize, *mut c_void) -> c_int;

/// `pw_rpc_method` of the header.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub struct RawRpcMethod {
    /// The name that clients call it by.
    pub name: *const c_char,
    /// The function; null is refused.
    pub function: Option<RpcFunction>,
    /// The pointer that the function gets beside its arguments.
    pub context: *mut c_void,
    /// Bit 0: the function trusts its callers.
    pub flags: u64,
}

/// A function of C with its context, which several threads call.
struct OfferedFunction {
    function: RpcFunction,
    context: *mut c_void,
    is_trusting: bool,
}

// SAFETY: the header says that functions run on threads of the library, one for each client; what they do with the context is C's side.
unsafe impl Send for OfferedFunction {}
// SAFETY: as above.
unsafe impl Sync for OfferedFunction {}

impl OfferedFunction {
    fn execute(&self, call: &IncomingCall<'_>) -> Result<CallAnswer, CallError> {
        let (result, copies) = (None, Vec::new());
        let is_trusting = self.is_trusting;
        let mut request = RpcRequestHandle { call, is_trusting, result, copies, copied: 0, views: Vec::new() };
        let copy;
        let args = if is_trusting {
            // SAFETY: the program has asked for this level of trust by the method's flag.
            unsafe { call.args().trusting() }
        } else {
            copy = call.args().try_to_vec()?;
            &copy
        };
        // SAFETY: C's function, with the arguments that the header promises; they live until it has returned.
        let code = unsafe { (self.function)(&raw mut request, args.as_ptr().cast(), args.len(), self.context) };
        match u32::try_from(code) {
            Ok(0) => Ok(request.result.map_or_else(|| ().into(), CallAnswer::from)),
            Ok(code) => Err(CallError::application(code, "the function has returned this code")),
            Err(_) => Err(CallError::Refused(format!("the function has returned {code}: codes are 0 and above"))),
        }
    }
}

impl RpcRequestHandle<'_> {
    fn at(&mut self, address: u64, len: usize) -> Result<*const c_void, CallFailure> {
        let view = self.call.follow(address, len as u64).map_err(|e| failure(&e))?;
        if self.is_trusting {
            // SAFETY: the program has asked for this level of trust by the method's flag.
            let place = unsafe { view.trusting() }.as_ptr();
            self.views.push(view);
            return Ok(place.cast());
        }
        self.copied = self.copied.saturating_add(len.max(1));
        if self.copied > MOST_COPIED {
            return Err(CallFailure::new(
                ErrorCode::TooLarge,
                "the call has made copies of 256 MiB of the client's memory".into(),
            ));
        }
        let copy = view.try_to_vec().map_err(|e| failure(&e))?.into_boxed_slice();
        let place = copy.as_ptr();
        self.copies.push(copy);
        Ok(place.cast())
    }
}

fn failure(error: &CallError) -> CallFailure {
    let code = match error {
        CallError::UnknownMethod => ErrorCode::UnknownMethod,
        CallError::BadPointer => ErrorCode::BadPointer,
        CallError::OutOfMemory(_) => ErrorCode::NoMemory,
        CallError::TimedOut => ErrorCode::TimedOut,
        CallError::Dead { .. } => ErrorCode::Dead,
        CallError::Moved { .. } => ErrorCode::Moved,
        CallError::Closed { .. } => ErrorCode::Closed,
        CallError::Corrupt(_) => ErrorCode::Corrupt,
        CallError::Connection(inner) => return CallFailure::of(inner, WaitFor::Data),
        _ => ErrorCode::Refused,
    };
    CallFailure::new(code, error.to_string())
}

/// The methods of an array of C.
///
/// # Safety
/// `methods` is null, or has `count` methods, whose names are texts.
unsafe fn offered<'a>(
    methods: *const RawRpcMethod,
    count: usize,
) -> Result<Vec<(&'a str, OfferedFunction)>, CallFailure> {
    let mut all = Vec::new();
    for i in 0..count {
        // SAFETY: the caller's promise.
        let raw = unsafe { argument::shared(methods.wrapping_add(i), "methods") }?;
        // SAFETY: the caller's promise.
        let name = unsafe { argument::text(raw.name, "the name of a method") }?;
        let function = raw.function.ok_or_else(|| CallFailure::invalid("the function of a method is NULL"))?;
        if raw.flags & !TRUSTING != 0 {
            return Err(CallFailure::invalid("unknown flags of a method: install a newer libpartywall, or clear them"));
        }
        let is_trusting = raw.flags & TRUSTING != 0;
        all.push((name, OfferedFunction { function, context: raw.context, is_trusting }));
    }
    Ok(all)
}

/// Copies the result of a call to memory of C, and returns its length, or the application's error code as C gets it.
///
/// # Safety
/// `result` has room for `size` bytes, which no reference refers to.
unsafe fn take_result<R>(
    outcome: Result<R, CallError>,
    view_of: impl Fn(&R) -> &PeerView,
    result: *mut c_void,
    size: usize,
) -> Result<isize, CallFailure> {
    let reply = match outcome {
        Ok(reply) => reply,
        Err(error @ CallError::Application { code, .. }) => {
            CallFailure::new(ErrorCode::Refused, error.to_string()).keep();
            // No side takes a code for which this is not an `int`.
            return Ok(FAILED - code as isize);
        }
        Err(error) => return Err(failure(&error)),
    };
    let view = view_of(&reply);
    let len = view.len();
    // SAFETY: the caller's promise.
    let result = unsafe { argument::buffer(result, size) }?;
    let place = result.get_mut(..len).ok_or_else(|| {
        CallFailure::new(ErrorCode::TooLarge, format!("the result has {len} bytes; there is room for {size}"))
    })?;
    view.read_at(0, place).map_err(|e| failure(&e))?;
    Ok(len as isize)
}

exported! {
    /// Connects to a service of calls, and offers methods to the server.
    pub fn pw_rpc_connect_back(
        domain: *const DomainHandle,
        target: *const c_char,
        options: *const RawOptions,
        methods: *const RawRpcMethod,
        count: usize,
        client: *mut *mut RpcClientHandle,
    ) -> c_int {
        // SAFETY: C passes an open handle, a text, and options or null.
        let (domain, target, options) =
            unsafe { (argument::shared(domain, "domain")?, argument::text(target, "target")?, options::chosen(options)?) };
        let mut builder = CallClient::builder().options(options);
        // SAFETY: C passes `count` methods.
        for (name, offered) in unsafe { offered(methods, count) }? {
            builder = builder.method(name, move |call| offered.execute(call));
        }
        let connect = || {
            let client = builder.connect(&domain.domain, target)?;
            Ok(Box::into_raw(Box::new(RpcClientHandle { client, memory: Mutex::default() })))
        };
        // SAFETY: C passes the address of a variable, or null.
        unsafe { argument::store(client, "client", connect) }?;
        Ok(0)
    }

    /// Calls a method of the client whose call a function executes.
    pub fn pw_rpc_call_back(
        request: *mut RpcRequestHandle<'_>,
        method: *const c_char,
        args: *const c_void,
        len: usize,
        result: *mut c_void,
        size: usize,
        timeout_ms: c_int,
    ) -> isize {
        // SAFETY: C passes the request that its function was given, on that thread, a text, and as many bytes as it says.
        let (request, method, args) = unsafe {
            (
                argument::exclusive(request, "request")?,
                argument::text(method, "method")?,
                argument::bytes(args, len)?,
            )
        };
        argument::check_buffer(result, size)?;
        let outcome = match Patience::from_ms(timeout_ms).timeout {
            Some(longest) => {
                request.call.call_back_within(longest.max(Duration::from_micros(1)), Method::named(method), args)
            }
            None => request.call.call_back(Method::named(method), args),
        };
        // The result may overwrite the arguments, which are used no more.
        // SAFETY: C passes room for as many bytes as it says.
        unsafe { take_result(outcome, |view| view, result, size) }
    }

    /// Connects to a service of calls.
    pub fn pw_rpc_connect(
        domain: *const DomainHandle,
        target: *const c_char,
        options: *const RawOptions,
        client: *mut *mut RpcClientHandle,
    ) -> c_int {
        // SAFETY: C passes an open handle, a text, and options or null.
        let (domain, target, options) =
            unsafe { (argument::shared(domain, "domain")?, argument::text(target, "target")?, options::chosen(options)?) };
        let connect = || {
            let client = CallClient::builder().options(options).connect(&domain.domain, target)?;
            Ok(Box::into_raw(Box::new(RpcClientHandle { client, memory: Mutex::default() })))
        };
        // SAFETY: C passes the address of a variable, or null.
        unsafe { argument::store(client, "client", connect) }?;
        Ok(0)
    }

    /// Changes the size of memory in the client's heap.
    pub fn pw_rpc_realloc(client: *mut RpcClientHandle, memory: *mut c_void, size: usize) -> *mut c_void {
        // SAFETY: C passes an open handle. Threads may share it, so it is not borrowed exclusively.
        let client = unsafe { argument::shared(client.cast_const(), "client") }?;
        let mut all = client.memory.lock().unwrap_or_else(PoisonError::into_inner);
        let wrong = || CallFailure::invalid("memory is not of this client's heap, or was freed: pass what pw_rpc_realloc has returned");
        let mut block = match memory.addr() {
            0 if size == 0 => return Ok(std::ptr::null_mut()),
            0 => client.client.heap().allocate(size)?,
            _ if size == 0 => return all.remove(&memory.addr()).map(|_| std::ptr::null_mut()).ok_or_else(wrong),
            address => {
                all.get_mut(&address).ok_or_else(wrong)?.resize(size)?;
                all.remove(&address).ok_or_else(wrong)?
            }
        };
        let place: *mut c_void = block.as_mut_ptr().cast();
        all.insert(place.addr(), block);
        Ok(place)
    }

    /// Calls a method.
    pub fn pw_rpc_call(
        client: *mut RpcClientHandle,
        method: *const c_char,
        args: *const c_void,
        len: usize,
        result: *mut c_void,
        size: usize,
        timeout_ms: c_int,
    ) -> isize {
        // SAFETY: C passes an open handle, a text, and as many bytes as it says.
        let (client, method, args) = unsafe {
            (
                argument::shared(client.cast_const(), "client")?,
                argument::text(method, "method")?,
                argument::bytes(args, len)?,
            )
        };
        argument::check_buffer(result, size)?;
        let longest = Patience::from_ms(timeout_ms).timeout;
        let outcome = match longest {
            Some(longest) => client.client.call_within(longest.max(Duration::from_micros(1)), Method::named(method), args),
            None => client.client.call(Method::named(method), args),
        };
        // The result may overwrite the arguments, which are used no more.
        // SAFETY: C passes room for as many bytes as it says.
        unsafe { take_result(outcome, |reply| reply.view(), result, size) }
    }

    /// Closes the connection.
    pub fn pw_rpc_disconnect(client: *mut RpcClientHandle) -> () {
        // SAFETY: C passes a handle that it uses no more.
        drop(unsafe { argument::take(client) });
        Ok(())
    }

    /// Offers methods as a service.
    pub fn pw_rpc_serve(
        domain: *const DomainHandle,
        service: *const c_char,
        methods: *const RawRpcMethod,
        count: usize,
        server: *mut *mut RpcServerHandle,
    ) -> c_int {
        // SAFETY: C passes an open handle and a text.
        let (domain, service) = unsafe { (argument::shared(domain, "domain")?, argument::text(service, "service")?) };
        let mut builder = CallServer::builder();
        // SAFETY: C passes `count` methods.
        for (name, offered) in unsafe { offered(methods, count) }? {
            builder = builder.method(name, move |call| offered.execute(call));
        }
        let serve = || {
            let server = builder.bind(&domain.domain, service)?;
            Ok(Box::into_raw(Box::new(RpcServerHandle { server })))
        };
        // SAFETY: C passes the address of a variable, or null.
        unsafe { argument::store(server, "server", serve) }?;
        Ok(0)
    }

    /// Memory for the result of a call.
    pub fn pw_rpc_result(request: *mut RpcRequestHandle<'_>, len: usize) -> *mut c_void {
        // SAFETY: C passes the request that its function was given, on that thread.
        let request = unsafe { argument::exclusive(request, "request") }?;
        let mut block = request.call.heap().allocate(len)?;
        let place = block.as_mut_ptr().cast();
        request.result = Some(block);
        Ok(place)
    }

    /// Bytes at an address of the client's.
    pub fn pw_rpc_at(request: *mut RpcRequestHandle<'_>, address: *const c_void, len: usize) -> *const c_void {
        // SAFETY: C passes the request that its function was given, on that thread.
        let request = unsafe { argument::exclusive(request, "request") }?;
        request.at(address.addr() as u64, len)
    }

    /// Stops a server.
    pub fn pw_rpc_stop(server: *mut RpcServerHandle) -> () {
        // SAFETY: C passes a handle that it uses no more.
        if let Some(handle) = unsafe { argument::take(server) } {
            handle.server.stop();
        }
        Ok(())
    }
}
