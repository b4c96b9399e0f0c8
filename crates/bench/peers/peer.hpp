// The parts that all peers of `partywall bench rpc` share: command line, orders, clock, content of sequences, output.
//
//   PROGRAM serve ADDRESS   prints "ready" when it listens
//   PROGRAM call ADDRESS    prints "ready" when it is connected, then answers each order on standard input with one line
//
// An order is "KIND DIRECTION ELEMENTS MOST MILLISECONDS". KIND is null, byte, fixed or variable; DIRECTION is send or receive. MOST and
// MILLISECONDS bound the number of measured calls. The answer is "p50=.. p99=.. ..." in nanoseconds, or "failed REASON".
#pragma once

#include <sched.h>
#include <signal.h>
#include <sys/prctl.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <iostream>
#include <memory>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

namespace peer {

struct Order {
    std::string kind, direction;
    int64_t elements = 0, most = 0;
    double milliseconds = 0;
    bool sends() const { return direction == "send"; }
};

// The content of sequences. A text has 15 characters, which a std::string keeps without an allocation.
inline uint8_t byte_at(int64_t at) { return uint8_t(at); }
inline int32_t number_at(int64_t at) { return int32_t(at); }
inline double weight_at(int64_t at) { return double(at) * 0.5; }
inline std::string text_at(int64_t at) {
    char text[24];
    snprintf(text, sizeof text, "element %07ld", long(at % 10000000));
    return text;
}

// The answer to a sequence that was sent: proves that the server has its length and its last element.
inline double byte_answer(int64_t n, uint8_t last) { return double(n) + last; }
inline double answer(int64_t n, double last) { return double(n) + last; }
inline double expected(const std::string& kind, int64_t n) {
    return kind == "byte" ? byte_answer(n, byte_at(n - 1)) : answer(n, weight_at(n - 1));
}
inline void check(double found, double wanted) {
    if (found != wanted) throw std::runtime_error("a call returned " + std::to_string(found) + " instead of " + std::to_string(wanted));
}

// Ends with the bench, and stays on the processor that the bench names.
inline void settle() {
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (const char* cpu = getenv("PARTYWALL_BENCH_CPU")) {
        cpu_set_t set;
        CPU_ZERO(&set);
        CPU_SET(atoi(cpu), &set);
        if (sched_setaffinity(0, sizeof set, &set)) perror("sched_setaffinity");
    }
}

// Takes HOST:PORT apart. False for an address without a colon.
inline bool split(const std::string& address, std::string& host, int& port) {
    const auto colon = address.rfind(':');
    if (colon == std::string::npos) return false;
    host = address.substr(0, colon), port = atoi(address.c_str() + colon + 1);
    return true;
}

inline void ready() { std::cout << "ready" << std::endl; }

using Call = std::function<void()>;

inline std::string measure(const Order& order, const Call& call) {
    using Clock = std::chrono::steady_clock;
    std::vector<uint64_t> times;
    times.reserve(order.most);
    // A tenth of the calls, and at least one, are a warm-up.
    auto begin = Clock::now();
    const auto part = [&](double share) { return begin + std::chrono::duration<double, std::milli>(order.milliseconds * share); };
    for (int64_t done = 0; done == 0 || (done < order.most / 10 && Clock::now() < part(0.1)); done++) call();
    begin = Clock::now();
    const auto end = part(1);
    auto last = begin;
    while (int64_t(times.size()) < std::max<int64_t>(order.most, 1)) {
        call();
        const auto now = Clock::now();
        times.push_back(std::chrono::duration_cast<std::chrono::nanoseconds>(now - last).count());
        last = now;
        if (now > end) break;
    }
    double sum = 0;
    for (auto time : times) sum += double(time);
    std::sort(times.begin(), times.end());
    const auto at = [&](double share) { return times[std::min(times.size() - 1, size_t(share * times.size()))]; };
    std::ostringstream out;
    out << "p50=" << at(0.5) << " p99=" << at(0.99) << " p999=" << at(0.999) << " max=" << times.back()
        << " mean=" << uint64_t(sum / double(times.size()));
    return out.str();
}

// Answers orders until the input ends. `make` prepares the data of an order and returns the call.
inline int answer_orders(const std::function<Call(const Order&)>& make) {
    ready();
    std::string line;
    while (std::getline(std::cin, line)) {
        try {
            Order order;
            std::istringstream(line) >> order.kind >> order.direction >> order.elements >> order.most >> order.milliseconds;
            std::cout << measure(order, make(order)) << std::endl;
        } catch (const std::exception& e) {
            std::string reason = e.what();
            std::replace(reason.begin(), reason.end(), '\n', ' ');
            std::cout << "failed " << reason << std::endl;
        }
    }
    return 0;
}

inline int run(int argc, char** argv, const std::function<int(const std::string&)>& serve,
               const std::function<int(const std::string&)>& call) {
    settle();
    try {
        const std::string role = argc == 3 ? argv[1] : "";
        if (role == "serve") return serve(argv[2]);
        if (role == "call") return call(argv[2]);
        std::cerr << "usage: " << argv[0] << " serve|call ADDRESS" << std::endl;
        return 2;
    } catch (const std::exception& e) {
        std::cerr << e.what() << std::endl;
        return 1;
    }
}

}  // namespace peer
