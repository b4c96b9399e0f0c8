// Cap'n Proto's RPC over a UNIX socket. Its messages are built for each call: they cannot be used twice.
#include <capnp/ez-rpc.h>
#include <capnp/message.h>

#include "peer.capnp.h"
#include "peer.hpp"

namespace {

struct FixedValue {
    int32_t left, right;
    double weight;
};
struct VariableValue {
    std::string text;
    double weight;
};

std::vector<uint8_t> bytes(int64_t n) {
    std::vector<uint8_t> all;
    for (int64_t at = 0; at < n; at++) all.push_back(peer::byte_at(at));
    return all;
}
std::vector<FixedValue> fixed(int64_t n) {
    std::vector<FixedValue> all;
    for (int64_t at = 0; at < n; at++) all.push_back({peer::number_at(at), peer::number_at(-at), peer::weight_at(at)});
    return all;
}
std::vector<VariableValue> variable(int64_t n) {
    std::vector<VariableValue> all;
    for (int64_t at = 0; at < n; at++) all.push_back({peer::text_at(at), peer::weight_at(at)});
    return all;
}
template <class Value>
const std::vector<Value>& prepared(uint32_t n, std::vector<Value> (*make)(int64_t)) {
    static std::vector<Value> kept;
    if (kept.size() != n) kept = make(n);
    return kept;
}

template <class Builder>
void put(const std::vector<uint8_t>& from, Builder to) {
    memcpy(to.initAll(from.size()).begin(), from.data(), from.size());
}
template <class Builder>
void put(const std::vector<FixedValue>& from, Builder to) {
    auto all = to.initAll(from.size());
    for (size_t at = 0; at < from.size(); at++) {
        auto one = all[at];
        one.setLeft(from[at].left), one.setRight(from[at].right), one.setWeight(from[at].weight);
    }
}
template <class Builder>
void put(const std::vector<VariableValue>& from, Builder to) {
    auto all = to.initAll(from.size());
    for (size_t at = 0; at < from.size(); at++) {
        auto one = all[at];
        one.setText(from[at].text.c_str()), one.setWeight(from[at].weight);
    }
}

double result(capnp::Data::Reader all) { return peer::byte_answer(all.size(), all[all.size() - 1]); }
template <class List>
double result(List all) {
    return peer::answer(all.size(), all[all.size() - 1].getWeight());
}

struct Server final : Peer::Server {
    kj::Promise<void> nothing(NothingContext) override { return kj::READY_NOW; }
    template <class Context>
    kj::Promise<void> taken(Context context) {
        context.getResults().setValue(result(context.getParams().getAll()));
        return kj::READY_NOW;
    }
    kj::Promise<void> sendBytes(SendBytesContext context) override { return taken(context); }
    kj::Promise<void> sendFixed(SendFixedContext context) override { return taken(context); }
    kj::Promise<void> sendVariable(SendVariableContext context) override { return taken(context); }
    kj::Promise<void> receiveBytes(ReceiveBytesContext context) override {
        put(prepared(context.getParams().getCount(), bytes), context.getResults());
        return kj::READY_NOW;
    }
    kj::Promise<void> receiveFixed(ReceiveFixedContext context) override {
        put(prepared(context.getParams().getCount(), fixed), context.getResults());
        return kj::READY_NOW;
    }
    kj::Promise<void> receiveVariable(ReceiveVariableContext context) override {
        put(prepared(context.getParams().getCount(), variable), context.getResults());
        return kj::READY_NOW;
    }
};

capnp::ReaderOptions options() {
    capnp::ReaderOptions options;
    options.traversalLimitInWords = 1ull << 40;
    return options;
}

int serve(const std::string& path) {
    capnp::EzRpcServer server(kj::heap<Server>(), "unix:" + path, 0, options());
    auto& scope = server.getWaitScope();
    server.getPort().wait(scope);
    peer::ready();
    kj::NEVER_DONE.wait(scope);
}

int call(const std::string& path) {
    capnp::EzRpcClient client("unix:" + path, 0, options());
    auto& scope = client.getWaitScope();
    Peer::Client it = client.getMain<Peer>();
    return peer::answer_orders([&](const peer::Order& order) -> peer::Call {
        const int64_t n = order.elements;
        const double wanted = order.kind == "null" ? 0 : peer::expected(order.kind, n);
        const auto send = [&scope, wanted](auto make) {
            return [&scope, wanted, make] { peer::check(make().send().wait(scope).getValue(), wanted); };
        };
        const auto receive = [&scope, wanted, n](auto make) {
            return [&scope, wanted, n, make] {
                auto request = make();
                request.setCount(n);
                peer::check(result(request.send().wait(scope).getAll()), wanted);
            };
        };
        if (order.kind == "null") return [&] { it.nothingRequest().send().wait(scope); };
        if (order.kind == "byte") {
            if (!order.sends()) return receive([&] { return it.receiveBytesRequest(); });
            return send([&it, all = bytes(n)] {
                auto request = it.sendBytesRequest();
                return put<decltype(request)&>(all, request), kj::mv(request);
            });
        }
        if (order.kind == "fixed") {
            if (!order.sends()) return receive([&] { return it.receiveFixedRequest(); });
            return send([&it, all = fixed(n)] {
                auto request = it.sendFixedRequest();
                return put<decltype(request)&>(all, request), kj::mv(request);
            });
        }
        if (!order.sends()) return receive([&] { return it.receiveVariableRequest(); });
        return send([&it, all = variable(n)] {
            auto request = it.sendVariableRequest();
            return put<decltype(request)&>(all, request), kj::mv(request);
        });
    });
}

}  // namespace

int main(int argc, char** argv) { return peer::run(argc, argv, serve, call); }
