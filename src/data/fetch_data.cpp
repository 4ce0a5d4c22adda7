#include <curl/curl.h>
#include <lockstep/base/error.hpp>
#include <lockstep/data/fetch_data.hpp>

#include <algorithm>
#include <array>
#include <exception>
#include <fstream>
#include <memory>
#include <optional>
#include <system_error>

#include "io/atomic_file.hpp"
#include "io/digest.hpp"
#include "io/links.hpp"

namespace lockstep {
namespace {

struct RemoteFile {
  const char* name;
  const char* sha256;
};
constexpr std::array remote_files = {
    RemoteFile{"train-images-idx3-ubyte.gz", "3aede38d61863908ad78613f6a32ed271626dd12800ba2636569512369268a84"},
    RemoteFile{"train-labels-idx1-ubyte.gz", "a04f17134ac03560a47e3764e11b92fc97de4d1bfaf8ba1a3aa29af54cc90845"},
    RemoteFile{"t10k-images-idx3-ubyte.gz", "346e55b948d973a97e58d2351dde16a484bd415d4595297633bb08f03db6a073"},
    RemoteFile{"t10k-labels-idx1-ubyte.gz", "67da17c76eaffca5446c3361aaab5c3cd6d1c2608764d35dfb1850b086bf8dd5"},
};
constexpr int64_t largest_file = 64 << 20;  // twice the largest file and more: then something else is being sent

const std::vector<std::string> known_base_urls = {
    "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
    "https://github.com/zalandoresearch/fashion-mnist/raw/master/data/fashion/",
};

constexpr const char* advice =
    "\nCheck the connection (and https_proxy, if there is a proxy), or install Debian's package dataset-fashion-mnist, "
    "or copy the four files from another machine and name their folder (`data_dir` DIR)";

constexpr const char* advice_on_checksums =
    "\nWhat is there is another file than Fashion-MNIST's, or was changed on the way. Try again, or another mirror, "
    "or install Debian's package dataset-fashion-mnist";

std::string sha256_of(const std::filesystem::path& file) {
  io::Digest sha256;
  std::ifstream in(file, std::ios::binary);
  std::array<char, 1 << 16> buffer;
  while (in.read(buffer.data(), buffer.size()), in.gcount() > 0) {
    sha256.update(buffer.data(), static_cast<size_t>(in.gcount()));
  }
  return sha256.hex();
}

// Brings one file from a URL to its place.
class Download {
 public:
  Download(const RemoteFile& remote, const std::filesystem::path& dir, const FetchOptions& options)
      : remote_(remote), options_(options), file_(dir / remote.name) {}

  struct Failure {
    std::string text;
    bool is_another_file = false;  // a wrong file arrived
  };
  // Downloads the file. Returns why the URL did not give the right file, or nothing if it did. Throws other failures.
  std::optional<Failure> run(const std::string& url) {
    std::unique_ptr<CURL, decltype(&curl_easy_cleanup)> curl(curl_easy_init(), curl_easy_cleanup);
    if (!curl) throw Error("libcurl could not be initialised", {Error::machine});
    std::array<char, CURL_ERROR_SIZE> message{};
    configure(curl.get(), url, message.data());
    CURLcode status = curl_easy_perform(curl.get());

    if (exception_) std::rethrow_exception(exception_);
    if (options_.stop.stop_requested()) throw Error("the download of " + url + " was stopped", {Error::stopped});
    if (received_ > largest_file) return Failure{"it sends more than " + std::to_string(largest_file) + " bytes"};
    if (status != CURLE_OK) return Failure{message[0] ? message.data() : curl_easy_strerror(status)};
    std::string sum = sha256_.hex();
    if (sum != remote_.sha256) {
      return Failure{"wrong checksum: expected SHA-256 " + std::string(remote_.sha256) + ", received " + sum,
                     /*is_another_file=*/true};
    }
    file_.commit();
    return std::nullopt;
  }

 private:
  void configure(CURL* curl, const std::string& url, char* message) {
    curl_easy_setopt(curl, CURLOPT_URL, url.c_str());
    curl_easy_setopt(curl, CURLOPT_PROTOCOLS_STR, "http,https,file");
    curl_easy_setopt(curl, CURLOPT_REDIR_PROTOCOLS_STR, "http,https");
    curl_easy_setopt(curl, CURLOPT_FOLLOWLOCATION, 1L);
    curl_easy_setopt(curl, CURLOPT_MAXREDIRS, 10L);
    curl_easy_setopt(curl, CURLOPT_FAILONERROR, 1L);
    curl_easy_setopt(curl, CURLOPT_CONNECTTIMEOUT, 15L);
    curl_easy_setopt(curl, CURLOPT_LOW_SPEED_LIMIT, 100L);  // bytes per second
    curl_easy_setopt(curl, CURLOPT_LOW_SPEED_TIME, 30L);
    curl_easy_setopt(curl, CURLOPT_NOSIGNAL, 1L);  // libcurl's signals would disturb other threads
    curl_easy_setopt(curl, CURLOPT_USERAGENT, "lockstep");
    curl_easy_setopt(curl, CURLOPT_ERRORBUFFER, message);
    curl_easy_setopt(curl, CURLOPT_WRITEFUNCTION, &Download::on_data);
    curl_easy_setopt(curl, CURLOPT_WRITEDATA, this);
    curl_easy_setopt(curl, CURLOPT_NOPROGRESS, 0L);
    curl_easy_setopt(curl, CURLOPT_XFERINFOFUNCTION, &Download::on_progress);
    curl_easy_setopt(curl, CURLOPT_XFERINFODATA, this);
  }

  // Keeps an exception until libcurl has returned: libcurl calls this and is C.
  template <class Action>
  bool succeeds(Action&& action) noexcept {
    try {
      action();
      return true;
    } catch (...) {
      exception_ = std::current_exception();
      return false;
    }
  }

  static size_t on_data(char* data, size_t, size_t bytes, void* self) {
    auto* download = static_cast<Download*>(self);
    bool good = download->succeeds([&] {
      download->file_.write(data, bytes);
      download->sha256_.update(data, bytes);
    });
    download->received_ += static_cast<int64_t>(bytes);
    return good && download->received_ <= largest_file ? bytes : CURL_WRITEFUNC_ERROR;
  }

  static int on_progress(void* self, curl_off_t total, curl_off_t done, curl_off_t, curl_off_t) {
    auto* download = static_cast<Download*>(self);
    const FetchOptions& options = download->options_;
    bool good = download->succeeds([&] {
      if (options.on_progress && done > 0) options.on_progress({download->remote_.name, done, total});
    });
    return good && !options.stop.stop_requested() ? 0 : 1;
  }

  const RemoteFile& remote_;
  const FetchOptions& options_;
  io::AtomicFile file_;
  io::Digest sha256_;
  int64_t received_ = 0;
  std::exception_ptr exception_;
};

// Tries the URLs in their order, and moves the one that worked to the front for the next file.
void fetch(const RemoteFile& remote, const std::filesystem::path& dir, std::vector<std::string>& base_urls,
           const FetchOptions& options) {
  std::string failures;
  bool arrived = false;  // some URL gave a file, right or wrong
  for (auto base = base_urls.begin(); base != base_urls.end(); ++base) {
    std::string url = *base + (base->ends_with('/') ? "" : "/") + remote.name;
    const auto failure = Download(remote, dir, options).run(url);
    if (!failure) {
      std::rotate(base_urls.begin(), base, base + 1);
      return;
    }
    arrived = arrived || failure->is_another_file;
    failures += "\n  " + url + ": " + failure->text;
  }
  throw Error("cannot download " + std::string(remote.name) + ":" + failures + (arrived ? advice_on_checksums : advice),
              {Error::machine});
}

}  // namespace

void fetch_fashion_mnist(const std::filesystem::path& dir, const FetchOptions& options) {
  std::error_code error = io::make_folders(dir);
  if (error) throw Error("cannot make the folder '" + dir.string() + "': " + error.message(), {Error::file});

  std::vector<std::string> base_urls = options.base_urls.empty() ? known_base_urls : options.base_urls;
  for (const RemoteFile& remote : remote_files) {
    std::filesystem::path file = dir / remote.name;
    if (std::filesystem::is_regular_file(file, error) && sha256_of(file) == remote.sha256) {
      auto size = static_cast<int64_t>(std::filesystem::file_size(file));
      if (options.on_progress) options.on_progress({remote.name, size, size});
      continue;
    }
    fetch(remote, dir, base_urls, options);
  }
}

}  // namespace lockstep
